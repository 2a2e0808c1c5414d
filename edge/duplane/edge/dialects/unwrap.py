"""Sounds inside an event, made the raw samples that other clients send: long ones take time to
decode, and this can be done elsewhere before a session takes the event. Pure."""

from __future__ import annotations

import math
from typing import cast

import pybase64

from duplane.edge.dialects.chat_request import MediaRoom, read_sound
from duplane.edge.dialects.fields import Fields, parse
from duplane.edge.dialects.media import WAV_IN_BASE64, decode_audio
from duplane.edge.faults import ClientError, UnreadableError
from duplane.edge.settings import Limits
from duplane.fabric.audio import INPUT_RATE_HERTZ

_MIN_BYTES = 256 * 1024  # of a message; what is shorter is decoded in a few milliseconds
_WAV_VALUE = f'"{WAV_IN_BASE64}'.encode()
_RATE = b'"sample_rate"'
_MAX_DEPTH = 8
_SOUNDS = frozenset(
    {
        *("audio", "audio_base64", "audio_data", "data", "base64"),
        *("ref_audio", "ref_audio_base64", "ref_audio_data"),
        *("tts_ref_audio", "tts_ref_audio_base64"),
    }
)


def is_worth_unwrapping(message: bytes) -> bool:
    """Tell quickly whether a message may hold a sound that takes long to decode."""
    return len(message) >= _MIN_BYTES and (_WAV_VALUE in message or _RATE in message)


def unwrap(message: bytes, limits: Limits) -> bytes | Fields:
    """Return the event with its sounds as base64 of raw samples at the rate of the fabric.

    What cannot be used, or is more than may be, is left to whoever reads it, who will say so.
    """
    try:
        event = parse(message, limits)
    except (ClientError, UnreadableError):
        return message
    return Fields(cast("dict[str, object]", _Unwrapping(limits).map(event.whole, 0)))


class _Unwrapping:
    """The sounds of one event, in as much room as all of them may take."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._max_s = max(limits.voice_s, limits.append_s, limits.chat_audio_s)
        voices_bytes = math.ceil(2 * limits.voice_s * INPUT_RATE_HERTZ) * 4
        self._room = MediaRoom(limits.chat_media_bytes + voices_bytes)

    def map(self, value: object, depth: int) -> object:
        if depth > _MAX_DEPTH:
            return value
        if isinstance(value, list):
            return [self.map(item, depth + 1) for item in cast("list[object]", value)]
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, object]", value)
        # A rate told beside it is of raw samples, which are brought to ours as the file is.
        if fields.get("sample_rate") is not None:
            return self._resampled(fields)
        return {
            key: self._unwrapped(item)
            if key in _SOUNDS and isinstance(item, str)
            else self.map(item, depth + 1)
            for key, item in fields.items()
        }

    def _resampled(self, fields: dict[str, object]) -> dict[str, object]:
        if fields.get("type") != "audio":
            return fields
        try:
            sound = self._room.take(read_sound(Fields(fields), self._limits, self._room), "")
        except ClientError:
            return fields
        encoded = pybase64.b64encode_as_string(sound)
        return {**fields, "data": encoded, "sample_rate": INPUT_RATE_HERTZ}

    def _unwrapped(self, text: str) -> str:
        if not text.startswith(WAV_IN_BASE64):
            return text
        max_s = min(self._max_s, self._room.sound_s)
        try:
            sound = self._room.take(decode_audio(text, "", max_s), "")
        except ClientError:
            return text
        return pybase64.b64encode_as_string(sound)
