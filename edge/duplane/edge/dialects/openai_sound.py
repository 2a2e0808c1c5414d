"""Sound in OpenAI's protocols: its formats, and the appends of a client."""

from __future__ import annotations

from collections.abc import Mapping

from duplane.edge.payload.fields import BASE64, Fields, invalid
from duplane.edge.payload.media import decode_base64
from duplane.edge.payload.sound_format import Encoding, SoundFormat

_PCM = "audio/pcm"
_ENCODINGS: Mapping[str, Encoding] = {
    _PCM: Encoding.INT16,
    "audio/pcmu": Encoding.ULAW,
    "audio/pcma": Encoding.ALAW,
}
_TYPES = {encoding: name for name, encoding in _ENCODINGS.items()}
_G711_RATE_HERTZ = 8_000
_PCM_RATE_HERTZ = 24_000

DEFAULT_FORMAT = SoundFormat(Encoding.INT16, _PCM_RATE_HERTZ)


def read_format(fields: Fields, pcm_rates_hertz: frozenset[int]) -> SoundFormat:
    """Return the format that an object `{"type": ..., "rate": ...}` describes. Raises ClientError.

    `pcm_rates_hertz` are the rates that the protocol has for PCM. G.711 has one rate.
    """
    name = fields.required_text("type", 64)
    encoding = _ENCODINGS.get(name)
    if encoding is None:
        raise invalid(fields.path("type"), f"must be one of {', '.join(_ENCODINGS)}")
    is_pcm = encoding is Encoding.INT16
    rates = pcm_rates_hertz if is_pcm else frozenset({_G711_RATE_HERTZ})
    rate_hertz = fields.integer("rate", 1, 1_000_000)
    if rate_hertz is None:
        rate_hertz = _PCM_RATE_HERTZ if is_pcm else _G711_RATE_HERTZ
    if rate_hertz not in rates:
        raise invalid(fields.path("rate"), f"must be {' or '.join(map(str, sorted(rates)))}")
    return SoundFormat(encoding, rate_hertz)


def format_fields(sound: SoundFormat) -> dict[str, object]:
    """Return the object that describes a format."""
    return {"type": _TYPES[sound.encoding], "rate": sound.rate_hertz}


def decode_append(
    event: Fields, sound: SoundFormat, begun: bytes, max_s: float
) -> tuple[bytes, bytes]:
    """Return the PCM of the field `audio`, and the first bytes of a sample that is not complete.

    `begun` are the bytes of such a sample of the append before. The PCM is empty if no sample is
    complete. Raises ClientError.
    """
    encoded = event.get("audio", BASE64, required=True)
    path = event.path("audio")
    audio = decode_base64(encoded, path) if isinstance(encoded, str) else encoded
    audio = begun + audio if begun else audio
    count, rest_bytes = divmod(len(audio), sound.sample_bytes)
    if not audio:
        raise invalid(path, "is empty")
    if count > max_s * sound.rate_hertz:
        raise invalid(path, f"lasts {count / sound.rate_hertz:g} s, more than {max_s:g} s")
    end = len(audio) - rest_bytes
    return sound.decode(audio[:end] if rest_bytes else audio), audio[end:]
