"""What a session yields, and how the events of dialects A and B become it. Pure."""

from __future__ import annotations

import base64
import json
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from duplane.client.errors import InputError, ServerError

INPUT_RATE = 16_000
OUTPUT_RATE = 24_000

Event = Mapping[str, Any]
Dialect = Literal["A", "B"]
_NOTHING: Event = {}
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_APPENDS: Mapping[Dialect, tuple[bytes, bytes]] = {
    "A": (b'{"type":"input_audio_buffer.append",', b"}"),
    "B": (b'{"type":"input.append","input":{', b"}}"),
}


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A place in the queue for a slot, from 1. `estimated_wait_s` is None if it is unknown.

    Then `reason` may say why: for example, that no worker serves such sessions now.
    """

    position: int
    queue_length: int
    estimated_wait_s: float | None
    ticket_id: str = ""
    reason: str = ""


@dataclass  # not frozen: that would take three times as long to make
class Output:
    """What the model does in one unit, or in B a part of it: text, audio and the end of a turn.

    The parts of a unit have the same `index`. If `interrupted`, drop what is not played yet.
    `dropped_units` counts units of input that the model never got. `input_id` is the name that
    `send` gave to the sound, in B. `metrics` are further measurements of the server, `received_s`
    is the time of `time.monotonic` at which the message came. In a resumable session `unit` and
    `part` number the event, and an event that the client missed while it was away is `replayed`.
    """

    index: int
    speaks: bool
    text: str = ""
    encoded_audio: str = field(default="", repr=False)
    """The speech as the server sent it: base64 of float32, little endian."""
    end_of_turn: bool = False
    interrupted: bool = False
    dropped_units: int = 0
    context_tokens: int = 0
    listen_probability: float | None = None
    turn_id: str | None = None
    input_id: str | None = None
    unit: int | None = None
    part: int | None = None
    replayed: bool = False
    metrics: Event = field(default_factory=lambda: _NOTHING)
    received_s: float = field(default_factory=time.monotonic, compare=False)

    @cached_property
    def audio(self) -> array[float]:
        """The speech: float32 at 24 kHz. Raises ServerError if it cannot be read."""
        return sound_of(self.encoded_audio)

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


def sound_of(encoded: str) -> array[float]:
    """Return float32 samples from base64. Raises ServerError."""
    samples: array[float] = array("f")
    try:
        samples.frombytes(base64.b64decode(encoded, validate=True))
    except ValueError:
        raise ServerError("the server sent audio that is not base64 of float32") from None
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
        str(event.get("reason", "")),
    )


def error_of(event: Event) -> InputError:
    """Return the error in an event `error`."""
    input_id = event.get("input_id")
    match event.get("error"):
        case {"code": str(code), "message": str(message)}:
            pass
        case other:
            code, message = "", str(other)
    return InputError(message, code, input_id=None if input_id is None else str(input_id))


def settings_event(
    dialect: Dialect,
    instructions: str,
    voice: str | None,
    seed: int | None,
    options: Mapping[str, object],
    resuming: Mapping[str, object],
) -> dict[str, object]:
    """Return the first event of a client. `voice` is base64 of a sound file. A has no seed.

    `resuming` has the fields with which the client asks for a session that it can return to.
    """
    if dialect == "A":
        session: dict[str, object] = {"instructions": instructions, **resuming}
        if voice is not None:
            session |= {"ref_audio": voice, "tts_ref_audio": voice}
        if options:
            session["voice_config"] = dict(options)
        return {"type": "session.update", "session": session}
    payload: dict[str, object] = {"system_prompt": instructions, **resuming}
    if seed is not None:
        payload["seed"] = seed
    if voice is not None:
        payload["voice"] = {"ref_audio_base64": voice, "tts_ref_audio_base64": voice}
    if options:
        payload["config"] = dict(options)
    return {"type": "session.init", "payload": payload}


def append_message(
    dialect: Dialect,
    audio: bytes,
    pictures: Sequence[str],
    *,
    force_listen: bool,
    input_id: str | None,
) -> bytes:
    """Return an event with sound and pictures, which are base64, as JSON. A has no `input_id`."""
    more: dict[str, object] = {}
    if pictures:
        more["video_frames"] = list(pictures)
    if force_listen:
        more["force_listen"] = True
    if input_id is not None:
        more["input_id"] = input_id
    begin, end = _APPENDS[dialect]
    fields = _to_json(more)[1:-1].encode() if more else b""
    # Base64 needs no escapes, and JSON would look for them for longer than all the rest takes.
    sound = (b'"audio":"', audio, b'"', b"," if fields else b"") if audio else ()
    return b"".join((begin, *sound, fields, end))


class OutputReader:
    """Makes outputs of the events of one session, and drops the speech that is interrupted."""

    def __init__(self) -> None:
        self._index = -1
        self._has_numbers = False  # the server numbers the units of B
        self._last_kind: object = None
        self._is_flushing = False

    def begin(self, created: Event) -> None:
        """Note what `session.created` says: servers of B that count tokens number the units."""
        self._has_numbers = "usage" in created

    def flush(self) -> None:
        """Drop the rest of the turn: speech, until the model listens or the turn ends."""
        self._is_flushing = True

    def read(self, event: Event, received_s: float) -> Output | None:
        """Return the output in an event; None if it has none. Raises ServerError."""
        try:
            output = self._read(event, received_s)
        except (TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"the server sent an output that cannot be read: {error}") from None
        if output is None or not self._is_flushing:
            return output
        if not output.speaks or output.end_of_turn:
            self._is_flushing = False
        return None if output.speaks else output

    def _read(self, event: Event, received_s: float) -> Output | None:
        match event.get("type"):
            case "response.listen" | "response.output_audio.delta":
                self._index += 1
                speaks = event["type"] != "response.listen"
                return self._output(event, received_s, speaks=speaks, is_first=True)
            case "response.output.delta":
                return self._part(event, received_s)
            case _:
                return None

    def _part(self, event: Event, received_s: float) -> Output | None:
        kind, before = event.get("kind"), self._last_kind
        self._last_kind = kind
        speaks = kind != "listen"
        ends = not speaks and event.get("response_id") is not None
        if is_first := "chunk_index" in event:
            self._has_numbers = True
            self._index = int(event["chunk_index"])
        elif not self._has_numbers:  # each unit begins with text, or it is one listen
            is_first = not ends and not (kind == "audio" and before == "text")
            if is_first or self._index < 0:
                self._index += 1
        elif not (event.get("audio") or event.get("text") or ends):
            return None  # the answer to an append that completes no unit
        return self._output(event, received_s, speaks=speaks, is_first=is_first, ends=ends)

    def _output(
        self,
        event: Event,
        received_s: float,
        *,
        speaks: bool,
        is_first: bool,
        ends: bool = False,
    ) -> Output:
        metrics: Event = event.get("metrics") or _NOTHING
        turn_id, input_id = event.get("response_id"), event.get("input_id")
        tokens = event.get("kv_cache_length", metrics.get("kv_cache_length", 0))
        return Output(
            index=self._index,
            speaks=speaks,
            text=str(event.get("text") or ""),
            encoded_audio=str(event.get("audio") or ""),
            end_of_turn=ends or bool(event.get("end_of_turn")),
            interrupted=bool(event.get("interrupted")),
            dropped_units=int(metrics.get("dropped_units", 0)) if is_first else 0,
            context_tokens=int(tokens),
            listen_probability=metrics.get("listen_probability"),
            turn_id=None if turn_id is None else str(turn_id),
            input_id=None if input_id is None else str(input_id),
            unit=event.get("unit"),
            part=event.get("part"),
            replayed=bool(event.get("replayed")),
            metrics=metrics,
            received_s=received_s,
        )
