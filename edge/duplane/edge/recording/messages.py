"""What of a chat's messages is new, once payloads are referenced. Pure.

Clients send their whole history with every turn: only what comes after the last answer is heard
for the first time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from duplane.fabric.audio import INPUT_RATE_HERTZ

_RATES_HERTZ = range(8_000, 192_001)


def spoken_now(event: object) -> dict[str, int]:
    """Return the user's sounds in the order of their parts: the blob's name, and its sample rate.

    A WAV file knows its own rate.
    """
    sounds: dict[str, int] = {}
    for message in _new_messages(event):
        for part in _objects(message.get("content")):
            reference = part.get("data")
            if part.get("type") == "audio" and isinstance(reference, str):
                sounds[reference.removeprefix("@")] = _rate(part.get("sample_rate"))
    return sounds


def _new_messages(event: object) -> list[Mapping[str, object]]:
    asked = _object(event)
    messages = _objects((_object(asked.get("input")) or asked).get("messages"))
    roles = [message.get("role") for message in messages]
    answered = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
    return [message for message in messages[answered:] if message.get("role") == "user"]


def _rate(told: object) -> int:
    return told if isinstance(told, int) and told in _RATES_HERTZ else INPUT_RATE_HERTZ


def _object(value: object) -> Mapping[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[Mapping[str, object]]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [_object(item) for item in items]
