"""What a session yields, and how the events of dialects A and B become it. Pure."""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

INPUT_RATE = 16_000
OUTPUT_RATE = 24_000

Event = Mapping[str, Any]
Dialect = Literal["A", "B"]
NO_SOUND: array[float] = array("f")


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A place in the queue for a slot, from 1. `estimated_wait_s` is None if it is unknown."""

    position: int
    queue_length: int
    estimated_wait_s: float | None
    ticket_id: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What the model does in one unit, or in B a part of it: text, audio and the end of a turn.

    The parts of a unit have the same `index`. `audio` is float32 at 24 kHz. If `interrupted`, drop
    what is not played yet. `dropped_units` counts units of input that the model never got.
    """

    index: int
    speaks: bool
    text: str = ""
    audio: array[float] = field(default_factory=lambda: NO_SOUND)
    end_of_turn: bool = False
    interrupted: bool = False
    dropped_units: int = 0
    context_tokens: int = 0
    listen_probability: float | None = None
    turn_id: str | None = None

    def pcm16(self) -> bytes:
        """Return the audio as int16, little endian."""
        return little_endian(
            array("h", (max(-32768, min(32767, round(each * 32768))) for each in self.audio))
        )


@dataclass(frozen=True, slots=True)
class End:
    """The orderly end of a session: the client's own reason, `stopped`, `timeout`, ..."""

    reason: str


def little_endian(samples: array[Any]) -> bytes:
    """Return the bytes of samples as the protocols have them."""
    if sys.byteorder == "big":
        samples = samples[:]
        samples.byteswap()
    return samples.tobytes()


def sound_of(encoded: object) -> array[float]:
    """Return float32 samples from base64. Raises ValueError."""
    samples: array[float] = array("f")
    try:
        samples.frombytes(base64.b64decode(str(encoded), validate=True))
    except binascii.Error:
        raise ValueError("the server sent audio that is not base64") from None
    if sys.byteorder == "big":
        samples.byteswap()
    return samples


def queue_place(event: Event) -> QueuePlace:
    """Return the place in `session.queued` and `session.queue_update`."""
    wait_s = event.get("estimated_wait_s")
    return QueuePlace(
        int(event.get("position", 0)),
        int(event.get("queue_length", 0)),
        float(wait_s) if wait_s else None,
        str(event.get("ticket_id", "")),
    )


def settings_event(
    dialect: Dialect, instructions: str, voice: str | None, options: Mapping[str, object]
) -> dict[str, object]:
    """Return the first event of a client. `voice` is base64 of a sound file."""
    if dialect == "A":
        session: dict[str, object] = {"instructions": instructions}
        if voice is not None:
            session |= {"ref_audio": voice, "tts_ref_audio": voice}
        if options:
            session["voice_config"] = dict(options)
        return {"type": "session.update", "session": session}
    payload: dict[str, object] = {"system_prompt": instructions}
    if voice is not None:
        payload["voice"] = {"ref_audio_base64": voice, "tts_ref_audio_base64": voice}
    if options:
        payload["config"] = dict(options)
    return {"type": "session.init", "payload": payload}


def append_event(
    dialect: Dialect, audio: str, pictures: Sequence[str], *, force_listen: bool
) -> dict[str, object]:
    """Return an event with sound and pictures, which are base64."""
    content: dict[str, object] = {"audio": audio} if audio else {}
    if pictures:
        content["video_frames"] = list(pictures)
    if force_listen:
        content["force_listen"] = True
    if dialect == "A":
        return {"type": "input_audio_buffer.append", **content}
    return {"type": "input.append", "input": content}


class OutputReader:
    """Makes outputs of the events of one session, and drops the speech that is interrupted."""

    def __init__(self) -> None:
        self._index = -1
        self._is_flushing = False

    def flush(self) -> None:
        """Drop the rest of the turn: speech, until the model listens or the turn ends."""
        self._is_flushing = True

    def read(self, event: Event) -> Output | None:
        """Return the output in an event; None if it has none. Raises ValueError."""
        match event.get("type"):
            case "response.listen" | "response.output_audio.delta":
                self._index += 1
                output = self._output(event, speaks=event["type"] != "response.listen")
            case "response.output.delta":
                output = self._part(event)
            case _:
                return None
        if output is None or not self._is_flushing:
            return output
        if not output.speaks or output.end_of_turn:
            self._is_flushing = False
        return None if output.speaks else output

    def _part(self, event: Event) -> Output | None:
        speaks = event.get("kind") != "listen"
        if isinstance(index := event.get("chunk_index"), int):
            self._index = index
        elif not (event.get("audio") or event.get("text") or event.get("response_id")) or (
            event.get("kind") == "text" and not event.get("text")
        ):
            return None  # the answer to an append that completes no unit
        ends = not speaks and event.get("response_id") is not None
        return self._output(event, speaks=speaks, ends=ends)

    def _output(self, event: Event, *, speaks: bool, ends: bool = False) -> Output:
        metrics: Event = event.get("metrics") or {}
        is_first = "chunk_index" in event or event["type"] != "response.output.delta"
        turn_id = event.get("response_id")
        tokens = event.get("kv_cache_length", metrics.get("kv_cache_length", 0))
        return Output(
            index=self._index,
            speaks=speaks,
            text=str(event.get("text") or ""),
            audio=sound_of(event["audio"]) if event.get("audio") else NO_SOUND,
            end_of_turn=ends or bool(event.get("end_of_turn")),
            interrupted=bool(event.get("interrupted")),
            dropped_units=int(metrics.get("dropped_units", 0)) if is_first else 0,
            context_tokens=int(tokens),
            listen_probability=metrics.get("listen_probability"),
            turn_id=None if turn_id is None else str(turn_id),
        )
