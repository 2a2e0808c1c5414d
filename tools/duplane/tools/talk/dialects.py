"""The client side of dialects C, E and L: messages of `duplane talk`, and the replies to them.

`duplane.client` speaks dialects A and B.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pybase64

from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.fabric.audio import INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ
from duplane.fabric.resampler import Resampler

_INT16 = SoundFormat(Encoding.INT16, OUTPUT_RATE_HERTZ)

Message = dict[str, Any]


@dataclass(frozen=True)
class UnitReply:
    """The server's answer to one unit, or a part of it. `audio` is base64 and may be empty.

    `is_whole` is False if more events about the same unit may follow.
    """

    unit: int
    is_speech: bool
    is_whole: bool
    text: str = ""
    audio: str = ""
    context: int = 0
    end_of_turn: bool = False
    listen_probability: float | None = None


class TalkDialect(Protocol):
    """One dialect of one conversation."""

    queue_prefix: str  # prefix of the types of queue events
    starts_at_once: bool  # the client does not wait for a slot before its first message
    ready: str  # the event after which units may be sent
    ended: frozenset[str]  # the events that end the session; empty if only the connection ends
    answers_each_unit: bool  # False if the server sends nothing while the model listens

    def __init__(self, prompt: str, voice: str | None) -> None: ...

    def path(self, mode: str) -> str:
        """Return the path and query of the URL."""
        ...

    def start(self) -> Message:
        """Return the message that begins the session."""
        ...

    def unit(self, number: int, audio: str, frames: list[str]) -> Message:
        """Return the message with one unit and its pictures; units are numbered from 0."""
        ...

    def close(self) -> Message | None:
        """Return the message that ends the session; None if the client ends the connection."""
        ...

    def replies(self, event: Message) -> Iterator[UnitReply]:
        """Yield the replies in `event`."""
        ...


class DialectC:
    """Dialect C, which begins with `prepare`. One `result` answers each unit, in order."""

    queue_prefix = ""
    starts_at_once = False
    ready = "prepared"
    ended = frozenset({"stopped", "timeout"})
    answers_each_unit = True

    def __init__(self, prompt: str, voice: str | None) -> None:
        self._settings: Message = {"system_prompt": prompt}
        if voice:
            self._settings["ref_audio_base64"] = voice
        self._answered = itertools.count()

    def path(self, mode: str) -> str:
        prefix = "adx" if mode == "audio" else "omni"
        return f"/ws/duplex/{prefix}_{secrets.token_hex(6)}"

    def start(self) -> Message:
        return {"type": "prepare"} | self._settings

    def unit(self, number: int, audio: str, frames: list[str]) -> Message:
        del number  # the dialect has no field for it
        event: Message = {"type": "audio_chunk", "audio_base64": audio}
        return event | ({"frame_base64_list": frames} if frames else {})

    def close(self) -> Message:
        return {"type": "stop"}

    def replies(self, event: Message) -> Iterator[UnitReply]:
        if event["type"] != "result":
            return
        yield UnitReply(
            unit=next(self._answered),
            is_speech=not event["is_listen"],
            is_whole=True,
            text=event["text"] or "",
            audio=event["audio_data"] or "",
            context=event["kv_cache_length"],
            end_of_turn=event["end_of_turn"],
            listen_probability=event.get("listen_probability"),
        )


class _OpenAI:
    """A protocol of OpenAI. Its sound is int16 at 24 kHz in both directions."""

    queue_prefix = "session."
    starts_at_once = True

    def __init__(self) -> None:
        self._resampler = Resampler(INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ, is_prompt=True)

    def _encode(self, audio: str) -> str:
        sound = self._resampler.add(pybase64.b64decode(audio))
        return pybase64.b64encode_as_string(_INT16.encode(sound))


class DialectE(_OpenAI):
    """Dialect E, which begins with `session.update`. No event answers a unit of listening.

    Its events name no unit: sound belongs to the newest unit.
    """

    ready = "session.created"
    ended: frozenset[str] = frozenset()
    answers_each_unit = False

    def __init__(self, prompt: str, voice: str | None) -> None:
        del voice  # the dialect has no field for it
        super().__init__()
        self._session = {"type": "realtime", "instructions": prompt}
        self._newest = 0  # number of the newest unit
        self._spoken: int | None = None  # number of the last unit of the open response
        self._text = ""

    def path(self, mode: str) -> str:
        del mode  # it is always audio
        return "/openai/v1/realtime?model=any"

    def start(self) -> Message:
        return {"type": "session.update", "session": self._session}

    def unit(self, number: int, audio: str, frames: list[str]) -> Message:
        del frames  # the dialect has no field for them
        self._newest = number
        return {"type": "input_audio_buffer.append", "audio": self._encode(audio)}

    def close(self) -> None:
        return None

    def replies(self, event: Message) -> Iterator[UnitReply]:
        match event["type"]:
            case "response.output_audio_transcript.delta":
                self._text += event["delta"]
            case "response.output_audio.delta":
                self._spoken = self._newest
                yield self._reply(_INT16.decode(pybase64.b64decode(event["delta"])))
            case "response.done" if self._spoken is not None:
                yield self._reply(b"", event["response"]["status"])
                self._spoken = None
            case _:
                return

    def _reply(self, audio: bytes, status: str = "") -> UnitReply:
        """Return a reply; `status` is the one of a response that has ended."""
        text, self._text = self._text, ""
        return UnitReply(
            unit=self._newest if self._spoken is None else self._spoken,
            is_speech=True,
            is_whole=bool(status),
            text=text,
            audio=pybase64.b64encode_as_string(audio),
            end_of_turn=status == "completed",
        )


class DialectL(_OpenAI):
    """Dialect L, which begins with `session.start`. `session.usage.updated` ends each answer."""

    ready = "session.started"
    ended = frozenset({"session.closed"})
    answers_each_unit = True

    def __init__(self, prompt: str, voice: str | None) -> None:
        del voice  # the dialect has no field for it
        super().__init__()
        self._session = {"model": "any", "instructions": prompt}
        self._answered = itertools.count()
        self._text = ""
        self._audio = b""

    def path(self, mode: str) -> str:
        del mode  # it is always audio
        return "/v1/live/sessions"

    def start(self) -> Message:
        return {"type": "session.start", "session": self._session}

    def unit(self, number: int, audio: str, frames: list[str]) -> Message:
        del number, frames  # the dialect has no fields for them
        return {"type": "session.input_audio.append", "audio": self._encode(audio)}

    def close(self) -> Message:
        return {"type": "session.close"}

    def replies(self, event: Message) -> Iterator[UnitReply]:
        match event["type"]:
            case "session.output_transcript.delta":
                self._text = event["delta"]
            case "session.output_audio.delta":
                self._audio = _INT16.decode(pybase64.b64decode(event["delta"]))
            case "session.usage.updated":
                is_speech = self._audio.strip(b"\0") != b""  # a unit of listening is silence
                yield UnitReply(
                    unit=next(self._answered),
                    is_speech=is_speech,
                    is_whole=True,
                    text=self._text,
                    audio=pybase64.b64encode_as_string(self._audio) if is_speech else "",
                )
                self._text, self._audio = "", b""
            case _:
                return


DIALECTS: dict[str, type[TalkDialect]] = {
    "C": DialectC,
    "E": DialectE,
    "L": DialectL,
}
