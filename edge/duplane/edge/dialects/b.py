"""Dialect B: `session.init`, `input.append`, and `response.output.delta` of three kinds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, ClassVar

import orjson

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close
from duplane.edge.dialects import speech
from duplane.edge.dialects.actions import (
    NO_TAG,
    NOTHING_DROPPED,
    Append,
    Configure,
    Dropped,
    Leave,
    Speak,
    SpeechEnding,
    Tag,
)
from duplane.edge.dialects.b_events import (
    APPEND,
    CLOSE,
    INIT,
    TRANSITIONS,
    BEvents,
    read_close,
    read_input_id,
)
from duplane.edge.dialects.b_settings import read_settings
from duplane.edge.dialects.dialect import (
    ALIVE,
    WAITING,
    Decoders,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
    queue_events,
    with_audio,
)
from duplane.edge.dialects.duplex import DuplexDialect, RestoredSettings
from duplane.edge.dialects.resumption import read_resumption
from duplane.edge.dialects.unit_metrics import Usage, metrics
from duplane.edge.identity import Identity
from duplane.edge.modes import Mode
from duplane.edge.payload.fields import BASE64, Fields, invalid, missing
from duplane.edge.payload.media import decode_audio
from duplane.edge.payload.pictures import read_frames, read_slice_count
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

_AUDIO_ALIASES = ("audio", "audio_base64", "audio_data")
_FRAMES_ALIASES = ("video_frames", "frame_base64_list", "frames")
_AUDIO_OBJECT_ALIASES = ("data", "base64")
# The accepted values of `payload.mode`: of sessions without pictures, and of those with pictures.
_MODES = (
    frozenset({"audio", "audio_duplex", "full_duplex"}),
    frozenset({"video", "omni", "omni_duplex", "full_duplex"}),
)


class DialectB(DuplexDialect):
    """One client that speaks B. `new_id` returns the 12 hex digits that name a turn."""

    name: ClassVar[str] = "B"
    return_event: ClassVar[str] = "session.resume"
    unit_paths: ClassVar[Mapping[str, str]] = {
        "audio": "input.audio",
        "video_frames": "input.video_frames",
        "force_listen": "input.force_listen",
    }
    transitions: ClassVar[Transitions] = {
        **TRANSITIONS,
        (Phase.OPENING, speech.REQUEST): Phase.OPENING,
        (Phase.ACTIVE, speech.REQUEST): Phase.ACTIVE,
    }
    replies: ClassVar[Replies] = {
        INIT: ("session.created",),
        APPEND: ("response.output.delta",),
        speech.REQUEST: (speech.DONE,),
        CLOSE: ("session.closed",),
    }
    server_events: ClassVar[ServerEvents] = {
        **queue_events("session.", WAITING),
        "session.created": frozenset({Phase.OPENING}),
        "response.output.delta": frozenset({Phase.ACTIVE}),
        speech.DONE: frozenset({Phase.ACTIVE}),
        "session.moving": frozenset({Phase.ACTIVE}),
        "session.closed": ALIVE,
        "error": ALIVE,
    }

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        mode: Mode,
        new_id: Callable[[], str] = lambda: secrets.token_hex(6),
    ) -> None:
        super().__init__(identity, limits, mode)
        self._events = BEvents(identity, "full_duplex")
        self._new_id = new_id
        self._turn_id: str | None = None  # id of the open turn
        self._chunk_index = 0
        self._context_token_count = 0

    # --- client events ---

    def _input_id(self, event: Fields) -> str | None:
        if event.whole.get("type") == speech.REQUEST:
            return speech.read_id(event, self.limits)
        return read_input_id(event, self.limits)

    def _event_decoders(self) -> Decoders:
        return {
            APPEND: self._decode_append,
            INIT: self._decode_settings,
            speech.REQUEST: lambda event: speech.read_speech(event, self.limits),
            CLOSE: self._decode_close,
        }

    def _decode_close(self, event: Fields) -> Leave:
        return read_close(event, self.limits)

    def _decode_settings(self, event: Fields) -> Configure:
        payload = event.required_fields("payload")
        max_slice_count = read_slice_count(payload) if self.mode.takes_frames else None
        resumption = read_resumption(payload, self.limits)
        settings, ignored, paths = read_settings(
            payload, self.limits, _MODES[self.mode.takes_frames]
        )
        return Configure(settings, max_slice_count, ignored, paths, INIT, resumption=resumption)

    def _decode_append(self, event: Fields) -> Append:
        given = event.required_fields("input")
        force_listen = given.get("force_listen", bool)
        hints = given.fields("hints")
        if force_listen is None and hints:
            force_listen = hints.get("force_listen", bool)
        frames: tuple[bytes, ...] = ()
        if self.mode.takes_frames:
            frames = read_frames(given, _FRAMES_ALIASES, self.limits)
        input_id = given.text("input_id", self.limits.text_bytes)
        response_id = given.text("response_id", self.limits.text_bytes)
        is_tagged = input_id is not None or response_id is not None
        audio = b""
        if not frames or given.first(*_AUDIO_ALIASES):  # an append may have pictures only
            audio = _decode_audio(given, self.limits.append_s)
        return Append(
            audio=audio,
            force_listen=force_listen or False,
            tag=Tag(input_id, response_id) if is_tagged else NO_TAG,
            frames=frames,
            max_slice_count=self._slice_count(given, hints) if frames else None,
            kind=APPEND,
        )

    def _slice_count(self, given: Fields, hints: Fields | None) -> int | None:
        hinted = read_slice_count(hints) if hints else None
        return read_slice_count(given) or hinted or self._max_slice_count

    # --- server events ---

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        self._context_token_count = opened.prompt_token_count
        ignored = self._without_effect(opened)
        model = {**self._model_fields, **self._unit_fields}
        return self._events.created(opened.prompt_token_count, ignored, model, now)

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped: Dropped, now: Moment
    ) -> list[bytes]:
        """Render a unit: `listen`, or `text` and `audio`; then a `listen` if the turn has ended.

        Speech without text and audio is rendered as an empty `text`, since every unit has a reply.
        """
        is_speech = delta.WhichOneof("outcome") == "speech"
        self._context_token_count = delta.context_token_count
        event = self._delta_event(tag, now)
        if is_speech:
            self._turn_id = tag.response_id or self._turn_id or self._new_turn_id(delta.sequence)
        if self._turn_id is not None and (is_speech or delta.end_of_turn):
            event["response_id"] = self._turn_id
        # The metrics are rendered once for all events of the unit.
        event["metrics"] = orjson.Fragment(orjson.dumps(metrics(delta, dropped)))
        counts = self._count(delta.token_counts)  # only on the first event of a unit
        events: list[bytes] = []
        audio = self._speech_audio(delta)
        if is_speech and (delta.speech.text or not (audio or delta.end_of_turn)):
            text = {"kind": "text", "text": delta.speech.text}
            events.append(orjson.dumps({**event, **text, **counts}))
            counts = {}
        if audio:
            events.append(with_audio({**event, "kind": "audio", **counts}, audio))
            counts = {}
        if delta.end_of_turn or not is_speech:
            listen: dict[str, object] = {"kind": "listen"}
            if delta.interrupted_turn:
                listen["interrupted"] = True
            events.append(orjson.dumps({**event, **listen, **counts}))
        if delta.end_of_turn:
            self._turn_id = None
        return events

    def _new_turn_id(self, unit: int) -> str:
        digits = self.turn_names(unit) if self.turn_names else self._new_id()
        return f"resp_{digits}"

    def _delta_event(self, tag: Tag, now: Moment) -> dict[str, object]:
        event = self._events.envelope("response.output.delta", now)
        if tag.input_id is not None:
            event["input_id"] = tag.input_id
        return event

    def speech_ended(
        self, speak: Speak, ending: SpeechEnding, message: str, now: Moment
    ) -> list[bytes]:
        """Render `speech.done`."""
        fields = speech.done_fields(speak, ending, message)
        return [orjson.dumps(self._events.envelope(speech.DONE, now) | fields)]

    def moving(self, within_s: float, now: Moment) -> list[bytes]:
        """Render `session.moving`, which clients may ignore."""
        event = self._events.envelope("session.moving", now)
        event["within_s"] = within_s
        return [orjson.dumps(event)]

    def notice(self, kind: str, fields: Mapping[str, object], now: Moment) -> bytes:
        """Render an event about the socket of a resumable session."""
        return orjson.dumps(self._events.envelope(f"{self.queue_prefix}{kind}", now) | {**fields})

    def state(self) -> Sequence[object]:
        """Return the open turn, the number of chunks, the tokens in the context, and the usage."""
        usage = astuple(self._events.usage)
        return (self._turn_id, self._chunk_index, self._context_token_count, *usage)

    def restore(self, state: Sequence[Any], settings: RestoredSettings) -> None:
        """Go on as the dialect whose state this is."""
        super().restore(state, settings)
        self._turn_id, self._chunk_index, self._context_token_count, *usage = state
        self._events.usage = Usage(*usage)

    def incomplete(self, tag: Tag, now: Moment) -> list[bytes]:
        """Render the reply to an append that completed no unit: `listen`, but not inside a turn.

        A `listen` would end an open turn, so inside a turn the reply is an empty `text`.
        """
        if self.phase is not Phase.ACTIVE:
            return []
        event = self._delta_event(tag, now)
        event["metrics"] = metrics(
            session_pb2.Delta(context_token_count=self._context_token_count), NOTHING_DROPPED
        )
        if self._turn_id is None:
            event["kind"] = "listen"
        else:
            event.update(kind="text", text="", response_id=self._turn_id)
        return [orjson.dumps(event)]

    def _count(self, token_counts: session_pb2.TokenCounts) -> dict[str, object]:
        used = Usage.of_unit(token_counts)
        self._events.usage.add(used)
        index, self._chunk_index = self._chunk_index, self._chunk_index + 1
        return {
            "chunk_index": index,
            "chunk_usage": used.to_json(),
            "usage": self._events.usage.to_json(),
        }

    def _closed_events(self, close: Close, now: Moment) -> list[bytes]:
        return self._events.closed(close, now)

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event."""
        return self._events.error(code, message, now, input_id)


def _decode_audio(given: Fields, max_s: float) -> bytes:
    key = given.first(*_AUDIO_ALIASES)
    if key is None:
        raise missing(given.path("audio"))
    encoded = given.get(key, object)
    if isinstance(encoded, BASE64):
        return decode_audio(encoded, given.path(key), max_s)
    nested = given.fields(key)
    inner = nested.first(*_AUDIO_OBJECT_ALIASES) if nested else None
    if nested is None or inner is None:
        raise invalid(given.path(key), "must be base64 text, or an object with `data`")
    audio = nested.get(inner, BASE64, required=True)
    return decode_audio(audio, nested.path(inner), max_s)
