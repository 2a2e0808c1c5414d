"""WAV files inside an event, made the raw samples that other clients send: long ones take time
to decode, and this can be done elsewhere before a session takes the event. Pure."""

from __future__ import annotations

import binascii
from typing import cast

import pybase64

from duplane.edge.dialects.fields import Fields, parse
from duplane.edge.faults import ClientError, UnreadableError
from duplane.edge.settings import Limits
from duplane.fabric.audio import AudioError, is_wav, pcm_from_samples, read_audio_file

_MIN_BYTES = 256 * 1024  # of a message; what is shorter is decoded in a few milliseconds
_WAV = "UklGR"  # RIFF in base64
_WAV_VALUE = f'"{_WAV}'.encode()
_MAX_DEPTH = 8
_SOUNDS = frozenset(
    {
        *("audio", "audio_base64", "audio_data", "data", "base64"),
        *("ref_audio", "ref_audio_base64", "ref_audio_data"),
        *("tts_ref_audio", "tts_ref_audio_base64"),
    }
)


def is_worth_unwrapping(message: bytes) -> bool:
    """Tell quickly whether a message may hold a WAV file that takes long to decode."""
    return len(message) >= _MIN_BYTES and _WAV_VALUE in message


def unwrap(message: bytes, limits: Limits) -> bytes | Fields:
    """Return the event with its WAV files as base64 of raw samples.

    What cannot be used is left to whoever reads it, who will say so.
    """
    max_s = max(limits.voice_s, limits.append_s, limits.chat_audio_s)
    try:
        event = parse(message)
    except (ClientError, UnreadableError):
        return message
    return Fields(cast("dict[str, object]", _map(event.whole, max_s, 0)))


def _map(value: object, max_s: float, depth: int) -> object:
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, list):
        return [_map(item, max_s, depth + 1) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, object]", value)
    # A rate told beside it is of raw samples: with one, it must stay seen that this is a file.
    if fields.get("sample_rate") is not None:
        return fields
    return {
        key: _unwrapped(item, max_s)
        if key in _SOUNDS and isinstance(item, str)
        else _map(item, max_s, depth + 1)
        for key, item in fields.items()
    }


def _unwrapped(text: str, max_s: float) -> str:
    if not text.startswith(_WAV):
        return text
    try:
        file = pybase64.b64decode(text, validate=True)
        if not is_wav(file):
            return text
        samples = read_audio_file(file, max_s=max_s, is_trusted=False)
    except (binascii.Error, ValueError, AudioError):
        return text
    return pybase64.b64encode_as_string(pcm_from_samples(samples)) if samples.size else text
