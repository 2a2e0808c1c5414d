"""What `duplane talk` says and hears in each public dialect, as seen from a client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class UnitReply:
    """How the server answered one unit, or a part of it; `audio` is base64, empty for none.

    `is_whole` is False while more events may follow about the same unit.
    """

    unit: int
    is_speech: bool
    is_whole: bool
    text: str = ""
    audio: str = ""
    context: int = 0
    end_of_turn: bool = False


class TalkDialect(Protocol):
    """One dialect of one conversation."""

    def __init__(self, prompt: str, voice: str | None) -> None: ...

    def start(self) -> Message:
        """Return the message that begins the session."""
        ...

    def unit(self, number: int, audio: str) -> Message:
        """Return the message that carries one unit, numbered from 0."""
        ...

    def close(self) -> Message:
        """Return the message that ends the session."""
        ...

    def replies(self, event: Message) -> Iterator[UnitReply]:
        """Yield what `event` says about a unit, if it does."""
        ...


class DialectA:
    """`session.update`: one event answers one unit, in order."""

    def __init__(self, prompt: str, voice: str | None) -> None:
        self._session = {"instructions": prompt} | ({"ref_audio": voice} if voice else {})
        self._answered = itertools.count()

    def start(self) -> Message:
        return {"type": "session.update", "session": self._session}

    def unit(self, number: int, audio: str) -> Message:
        del number  # the dialect has no place for it
        return {"type": "input_audio_buffer.append", "audio": audio}

    def close(self) -> Message:
        return {"type": "session.close", "reason": "user_stop"}

    def replies(self, event: Message) -> Iterator[UnitReply]:
        if event["type"] not in ("response.listen", "response.output_audio.delta"):
            return
        yield UnitReply(
            unit=next(self._answered),
            is_speech=event["type"] == "response.output_audio.delta",
            is_whole=True,
            text=event.get("text") or "",
            audio=event.get("audio") or "",
            context=event.get("kv_cache_length", 0),
            end_of_turn=event.get("end_of_turn", False),
        )


class DialectB:
    """`session.init`: a spoken unit comes as up to three events that echo its `input_id`."""

    def __init__(self, prompt: str, voice: str | None) -> None:
        self._payload: Message = {"system_prompt": prompt}
        if voice:
            self._payload["voice"] = {"ref_audio_base64": voice}

    def start(self) -> Message:
        return {"type": "session.init", "payload": self._payload}

    def unit(self, number: int, audio: str) -> Message:
        return {"type": "input.append", "input": {"audio": audio, "input_id": str(number)}}

    def close(self) -> Message:
        return {"type": "session.close", "reason": "user_stop"}

    def replies(self, event: Message) -> Iterator[UnitReply]:
        if event["type"] != "response.output.delta":
            return
        is_listen = event["kind"] == "listen"
        closes_turn = is_listen and "response_id" in event
        yield UnitReply(
            unit=int(event["input_id"]),
            is_speech=not is_listen or closes_turn,
            is_whole=is_listen,
            text=event.get("text") or "",
            audio=event.get("audio") or "",
            context=event.get("metrics", {}).get("kv_cache_length", 0),
            end_of_turn=closes_turn,
        )


DIALECTS: dict[str, type[TalkDialect]] = {"A": DialectA, "B": DialectB}
