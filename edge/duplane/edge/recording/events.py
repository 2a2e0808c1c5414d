"""Replaces media in events by references to files, and these references by the media again.

Pure. References and `payload_trace` have the form that the reference's recordings have, so that its
tools can play recordings and send them again.
"""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import orjson
import pybase64

from duplane.edge.payload.sound_format import (
    INPUT_SOUND,
    RAW_SUFFIXES,
    Encoding,
    SoundFormat,
)

_MIN_ENCODED = 64  # characters; shorter base64 (a dozen samples) stays in the event
_REFERENCE = re.compile(r"((?:data:[^,]{0,250},)?)@(blob/\d{1,9}\.[a-z0-9]{1,4})")
# The base64 in a data URI is replaced; what comes before it stays in the event.
_DATA_URI = re.compile(r"data:[^,]{0,243};base64,")
# The token of a resumable session, in an event that says or shows it. Such events are short.
_TOKEN = re.compile(rb'("token"\s*:\s*")[^"]*')
# The place in the queue of such a session, also in settings, which may be long.
_QUEUE_TOKEN = re.compile(rb'("queue_token"\s*:\s*")[^"]*')
_MAX_TOKEN_EVENT = 64 * 1024
_MAX_DEPTH = 64
# File types: the bytes that identify each type, and the offset of these bytes.
_SIGNATURES = (
    (8, b"WAVE", "wav"),
    (8, b"WEBP", "webp"),
    (4, b"ftyp", "mp4"),
    (0, b"\x1aE\xdf\xa3", "webm"),
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
)
WAV_SUFFIX = ".wav"
_SETTINGS = "session.init"  # its voices stay in the event, as in the reference's recordings
_DATA_KEYS = ("data", "base64")  # fields with raw audio, unless the first bytes show another type
# Events of OpenAI's protocols with raw audio in the field `delta`; in others this field has text.
_AUDIO_DELTAS = ("session.output_audio.delta", "response.output_audio.delta")


class _TooDeepError(ValueError):
    """The event is nested more deeply than any valid event."""


@dataclass(frozen=True, slots=True)
class Blob:
    """One payload: its file name within the recording, and the field that held it."""

    name: str
    key: str
    content: bytes
    sound: SoundFormat | None  # of raw audio of the conversation, but not of a reference voice

    @property
    def is_picture(self) -> bool:
        """True for video frames."""
        return self.name.endswith((".jpg", ".png", ".webp"))

    @property
    def is_audio(self) -> bool:
        """True for raw audio of the conversation; False for a reference voice."""
        return self.sound is not None

    @property
    def wav_name(self) -> str:
        """The name of the WAV file that has the same sound as raw audio of the conversation."""
        return self.name.rpartition(".")[0] + WAV_SUFFIX

    @property
    def reference(self) -> str:
        """The text that replaces the payload in its event."""
        return f"@{self.wav_name if self.is_audio else self.name}"


def without_token(frame: bytes) -> bytes:
    """Return an event without the tokens with which a client can return to its session."""
    if b'"queue_token"' in frame:
        frame = _QUEUE_TOKEN.sub(rb"\1***", frame)
    if len(frame) > _MAX_TOKEN_EVENT or b"token" not in frame:
        return frame
    return _TOKEN.sub(rb"\1***", frame)


def split(
    frame: bytes, first_number: int, sound: SoundFormat = INPUT_SOUND
) -> tuple[object, list[Blob]]:
    """Return the event with a reference `@blob/...` for each payload, and the payloads in order.

    Every long base64 string counts as a payload, in any field of any dialect, except in the
    settings of dialect B. A frame that is not JSON, or is nested too deeply, is one payload. Files
    are numbered from `first_number`. Raw audio has the format `sound`.
    """
    blobs: list[Blob] = []
    event: object = None

    def add_blob(content: bytes, key: str) -> str:
        suffix = _suffix(content, key, event, sound)
        name = f"blob/{first_number + len(blobs):06d}.{suffix}"
        is_sound = suffix == sound.suffix and "ref" not in key
        blobs.append(Blob(name, key, content, sound if is_sound else None))
        return blobs[-1].reference

    def split_text(text: str, key: str) -> str:
        return _split_text(text, key, add_blob)

    try:
        event = orjson.loads(frame)
        short = _map_texts(event, _keep if event_type(event) == _SETTINGS else split_text)
    except (orjson.JSONDecodeError, _TooDeepError):
        blobs.clear()
        return add_blob(frame, ""), blobs
    return short, blobs


def event_type(event: object) -> str:
    """Return the type of an event; empty if it has none."""
    if not isinstance(event, dict):
        return ""
    return str(cast("dict[str, object]", event).get("type", ""))


def _keep(text: str, key: str) -> str:
    del key
    return text


def _split_text(text: str, key: str, add_blob: Callable[[bytes, str], str]) -> str:
    uri = _DATA_URI.match(text)
    encoded = text[uri.end() :] if uri else text
    if len(encoded) < _MIN_ENCODED or len(encoded) % 4:
        return text
    try:
        content = pybase64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return text
    return (uri[0] if uri else "") + add_blob(content, key)


def payload_trace(blobs: Sequence[Blob]) -> dict[str, object]:
    """Describe the raw audio and the pictures of one event of a duplex session; empty if none."""
    trace: dict[str, object] = {}
    for blob in blobs:
        if sound := blob.sound:
            trace["audio"] = {
                **_size_and_hash(blob.content),
                "samples": len(blob.content) // sound.sample_bytes,
                "dtype": sound.encoding,
                "sample_rate": sound.rate_hertz,
                f"blob_{sound.suffix}": f"@{blob.name}",
                "blob_wav": f"@{blob.wav_name}",
            }
    pictures = [
        {**_size_and_hash(blob.content), "blob_jpg": blob.reference}
        for blob in blobs
        if blob.is_picture
    ]
    return {**trace, "video_frames": pictures} if pictures else trace


def _size_and_hash(content: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "nbytes": len(content)}


def join(event: object, read: Callable[[str], bytes]) -> object:
    """Undo `split`: replace each reference by the base64 of what `read` returns for its name.

    If a WAV file has the sound of raw audio, the raw audio is read. A string that looks like a
    reference stays unchanged if `read` raises LookupError or FileNotFoundError.
    """

    def join_text(text: str, key: str) -> str:
        del key
        reference = _REFERENCE.fullmatch(text)
        if reference is None:
            return text
        head, name = reference.groups()
        stem = name.removesuffix(WAV_SUFFIX)
        names = [f"{stem}.{suffix}" for suffix in RAW_SUFFIXES] if stem != name else []
        for each in (*names, name):
            with contextlib.suppress(LookupError, FileNotFoundError):
                return head + pybase64.b64encode_as_string(read(each))
        return text

    return _map_texts(event, join_text)


def _map_texts(
    value: object, change: Callable[[str, str], str], key: str = "", depth: int = 0
) -> object:
    if depth > _MAX_DEPTH:
        raise _TooDeepError
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {name: _map_texts(item, change, name, depth + 1) for name, item in fields.items()}
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [_map_texts(item, change, key, depth + 1) for item in items]
    return value


def _suffix(content: bytes, key: str, event: object, sound: SoundFormat) -> str:
    is_audio = "audio" in key or key in _DATA_KEYS
    is_audio |= key == "delta" and event_type(event) in _AUDIO_DELTAS
    is_file = key in _DATA_KEYS and content.startswith(b"RIFF") and content[8:12] == b"WAVE"
    if is_audio and sound.encoding is not Encoding.FLOAT32 and not is_file:
        return sound.suffix  # such sound may begin with any bytes
    for offset, signature, suffix in _SIGNATURES:
        if content.startswith(signature, offset):
            return suffix
    return sound.suffix if is_audio and len(content) % sound.sample_bytes == 0 else "bin"
