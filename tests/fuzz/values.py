"""Values for mutated messages: some are nearly valid, others are far from it.

A value is JSON in the notation of transcripts: "@pcm:16000" stands for audio (see
`support.protocols.transcripts`). A `Raw` fragment holds text that no JSON library would write.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import orjson
import pybase64
import soundfile
from support.protocols.transcripts import jpeg, media_of, pcm, png, wav, without_time

Raw = orjson.Fragment


@functools.cache
def in_base64(word: str) -> Raw | None:
    """Return the base64 text for an @-word, or None for an unknown word."""
    try:
        media = media_of(word)
    except ValueError:  # a mutated word
        return None
    return None if media is None else Raw(b'"' + pybase64.b64encode(media) + b'"')


def render(value: Any) -> bytes:
    """Return the JSON text of a value, with its @-words replaced."""
    return orjson.dumps(expanded(value))


def expanded(value: Any) -> Any:
    """Return the value with its @-words replaced."""
    if isinstance(value, dict):
        return {key: expanded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [expanded(item) for item in value]
    if isinstance(value, str) and value.startswith("@"):
        return in_base64(value) or value
    return value


def clone(value: Any) -> Any:
    """Return a copy with new containers and the same leaves, which are immutable."""
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clone(item) for item in value]
    return value


def encoded(media: bytes) -> str:
    return pybase64.b64encode(media).decode()


NUMBERS: list[Any] = [
    *(0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.0, 3.0, 9, 10, 99, 255, 1e-320, 1e308, -1e308),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1),
    *map(
        Raw, (b"1e400", b"-1e400", b"18446744073709551616", b"9" * 400, b"-0", b"-0.0", b"1e-400")
    ),
    *map(Raw, (b"0.1e1", b"1E2", b"3." + b"0" * 200, b"1" * 309)),
]
NOT_JSON: list[Any] = [
    *map(
        Raw, (b"NaN", b"Infinity", b"-Infinity", b"01", b"+1", b".5", b"0x1", b"1.", b"undefined")
    ),
    *map(Raw, (b"'x'", b"", b"[1,]", b"{a:1}", b"[", b'"\x01"', b'"\xff"', b'"\xed\xa0\x80"')),
]
TEXTS: list[Any] = [
    *("", " ", "x", "\x00", "true", "null", "1", "\u202e\u2066", "\U0001f399" * 30, "é" * 700),
    *("x" * 200, "x" * 3000, "x" * 70_000, "../../etc/passwd", "%s%n{0}", "<script>", "\r\n\r\n"),
    *map(Raw, (b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\\/"')),
]
SIMPLE: list[Any] = [None, True, False, [], {}, [[]], [{}], {"": None}, {"data": None}]

DEPTHS = (5, 120, 250, 1000, 1020, 1030, 3000)


def deep(rng: Random) -> Raw:
    """Return JSON nested to a depth near or above the limits of parsers."""
    depth = rng.choice(DEPTHS)
    if rng.random() < 0.5:
        return Raw(b"[" * depth + b"]" * depth)
    return Raw(b'{"data":' * depth + b"0" + b"}" * depth)


# --- audio ---


@functools.cache
def _sound(subtype: str, rate_hertz: int, channel_count: int, container: str = "WAV") -> bytes:
    file = io.BytesIO()
    samples = np.zeros((256, channel_count), dtype=np.float32)
    soundfile.write(file, samples, rate_hertz, format=container, subtype=subtype)
    return without_time(file.getvalue())


SOUNDS = (
    *(("PCM_16", rate, 1) for rate in (1, 7_999, 8_000, 44_100, 48_000, 48_001, 2**31 - 1)),
    *((subtype, 16_000, 1) for subtype in ("PCM_U8", "PCM_24", "DOUBLE", "ULAW", "IMA_ADPCM")),
    *(("FLOAT", 16_000, count) for count in (2, 3, 64)),
)
SHORT_AUDIO = ["@pcm:1", "@pcm:160", "@pcm:3200", "@wav:400"]
AUDIO = [*SHORT_AUDIO, "@pcm:16000", "@pcm:40000", "@pcm:50000", "@wav:16000"]
_NUMBERS_IN_FILES = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff\xff\xff\x7f", b"\1\0"]


def audio(rng: Random) -> Any:
    """Return audio, valid or invalid."""
    return rng.choice(_AUDIO_KINDS)(rng)


_AUDIO_KINDS: tuple[Callable[[Random], Any], ...] = (
    lambda rng: rng.choice(AUDIO),
    lambda rng: rng.choice(["@nan:1600", "@nan:1", encoded(_broken_samples(rng))]),
    lambda rng: encoded(_sound(*rng.choice(SOUNDS))),
    lambda rng: encoded(_sound("PCM_16", 16_000, 1, rng.choice(["FLAC", "AIFF", "W64", "CAF"]))),
    lambda rng: encoded(damaged_file(rng, wav(100))),
    lambda rng: encoded(damaged_file(rng, wav(100))),
    lambda rng: encoded(pcm(40)[: rng.randrange(1, 160)]),
    lambda rng: damaged_base64(rng, encoded(pcm(100))),
    lambda rng: damaged_base64(rng, encoded(pcm(100))),
)


def _broken_samples(rng: Random) -> bytes:
    samples = np.zeros(40, dtype="<f4")
    samples[rng.randrange(40)] = rng.choice([np.nan, np.inf, -np.inf, 2e6, 3.4e38, 1e-45])
    return samples.tobytes()


def damaged_file(rng: Random, media: bytes) -> bytes:
    """Return a file whose header contradicts its content in most cases."""
    file = bytearray(media)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(64, len(file)) or 1)
        file[at : at + 4] = rng.choice([*_NUMBERS_IN_FILES, rng.randbytes(4)])
    if rng.random() < 0.3:
        del file[rng.randrange(len(file)) :]
    return bytes(file)


def damaged_base64(rng: Random, text: str) -> str:
    """Return base64 with an invalid length or invalid characters."""
    at = rng.randrange(len(text))
    return rng.choice(
        [
            text[:at],
            text[:at] + rng.choice(["=", "==", "-_", " ", "\n", "%3D", "\0", "é", "!"]) + text[at:],
            "data:audio/wav;base64," + text,
            text + "=",
            text.rstrip("=") + "====",
            text[: at // 4 * 4 + 1],
        ]
    )


# --- pictures ---


def picture(rng: Random) -> Any:
    """Return a picture, valid or invalid. Pictures with huge dimensions are small files."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(["@jpeg:2x2", "@png:2x2", "@png:640x480"])
    if kind == 1:
        size = rng.choice([(0, 9), (9, 0), (65_535, 65_535), (2**16, 2**16), (4_097, 4_096)])
        clipped = tuple(min(side, 65_535) for side in size)
        return encoded(rng.choice([png(*size), jpeg(*clipped)]))
    if kind == 2:
        return encoded(png(2**32 - 1, 2**32 - 1) + bytes(300))
    media = rng.choice([png(4, 4) + bytes(40), jpeg(4, 4) + bytes(40), b"\xff\xd8" + b"\xff" * 90])
    if kind == 5:
        return damaged_base64(rng, encoded(media))
    return encoded(damaged_file(rng, media))


def anything(rng: Random) -> Any:
    """Return a value of any kind; one in a hundred is not JSON."""
    chance = rng.random()
    if chance < 0.01:
        return rng.choice(NOT_JSON)
    if chance < 0.3:
        return rng.choice(NUMBERS)
    if chance < 0.5:
        return rng.choice(TEXTS)
    if chance < 0.7:
        return clone(rng.choice(SIMPLE))
    if chance < 0.85:
        return audio(rng)
    return picture(rng) if chance < 0.97 else deep(rng)
