"""Dialect B: `session.init`, `input.append`, and `response.output.delta` of three kinds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import ClassVar, cast

import orjson

from duplane.edge.dialects.b_metrics import Usage, metrics
from duplane.edge.dialects.b_settings import read_settings
from duplane.edge.dialects.dialect import (
    ALIVE,
    NO_TAG,
    WAITING,
    Action,
    Answers,
    Append,
    Configure,
    Dialect,
    Identity,
    Leave,
    Moment,
    Phase,
    ServerEvents,
    Tag,
    Transitions,
    Turn,
    queue_events,
    with_audio,
)
from duplane.edge.dialects.fields import Fields, invalid, missing
from duplane.edge.dialects.frames import is_of_pictures_alone, read_frames, read_slice_count
from duplane.edge.dialects.media import decode_audio
from duplane.edge.ends import End, Ending
from duplane.edge.faults import ClientError, ErrorCode
from duplane.edge.modes import Mode
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

INIT = "session.init"
APPEND = "input.append"
CLOSE = "session.close"

CLOSED_REASONS: Mapping[End, str] = {
    End.CLIENT: "client_closed",  # unless the client gave a reason, which is echoed
    End.TIMEOUT: "timeout",
    End.CONTEXT_FULL: "context_full",
    End.SHUTDOWN: "server_shutdown",
    End.FAILED: "backend_error",
}
_AUDIO_ALIASES = ("audio", "audio_base64", "audio_data")
_FRAMES_ALIASES = ("video_frames", "frame_base64_list", "frames")
_AUDIO_OBJECT_ALIASES = ("data", "base64")


class DialectB(Dialect):
    """One client that speaks B. `new_id` draws the 12 hex digits that name a turn."""

    name: ClassVar[str] = "B"
    backend_mode: ClassVar[str] = "full_duplex"  # the backend's word for audio and video alike
    lost_while_opening: ClassVar[End] = End.FAILED
    transitions: ClassVar[Transitions] = {
        (Phase.START, INIT): Phase.OPENING,
        (Phase.START, CLOSE): Phase.CLOSED,
        (Phase.OPENING, APPEND): Phase.OPENING,  # held until the conversation is ready
        (Phase.OPENING, CLOSE): Phase.CLOSED,
        (Phase.ACTIVE, APPEND): Phase.ACTIVE,
        (Phase.ACTIVE, CLOSE): Phase.CLOSED,
    }
    answers: ClassVar[Answers] = {
        INIT: ("session.created",),
        APPEND: ("response.output.delta",),
        CLOSE: ("session.closed",),
    }
    server_events: ClassVar[ServerEvents] = {
        **queue_events("session.", WAITING),
        "session.created": frozenset({Phase.OPENING}),
        "response.output.delta": frozenset({Phase.ACTIVE}),
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
        self._new_id = new_id
        self._turn_id: str | None = None  # of the turn that is open
        self._ignored: list[str] = []
        self._max_slice_count: int | None = None  # of appends that name none
        self._usage = Usage()
        self._chunk_index = 0
        self._context_token_count = 0

    def receive(self, event: Fields) -> Action:
        """Take one client event. Raises ClientError, with the event's `input_id` if it has one."""
        try:
            return super().receive(event)
        except ClientError as fault:
            fault.input_id = self._input_id(event)
            raise

    def _input_id(self, event: Fields) -> str | None:
        given = event.whole.get("input")
        name = cast("dict[str, object]", given).get("input_id") if isinstance(given, dict) else None
        is_name = isinstance(name, str) and len(name.encode()) <= self.limits.text_bytes
        return cast(str, name) if is_name else None

    def _read(self, kind: str, event: Fields) -> Action:
        if kind == APPEND:
            return self._read_append(event.required_fields("input"))
        if kind == INIT:
            payload = event.required_fields("payload")
            if self.mode.takes_frames:
                self._max_slice_count = read_slice_count(payload)
            settings, self._ignored = read_settings(payload, self.limits)
            return Configure(settings)
        return Leave(event.text("reason", max_bytes=self.limits.text_bytes) or "")

    def _read_append(self, given: Fields) -> Append | Turn:
        force_listen = given.flag("force_listen")
        hints = given.fields("hints")
        if force_listen is None and hints:
            force_listen = hints.flag("force_listen")
        frames: tuple[bytes, ...] = ()
        if self.mode.takes_frames:
            frames = read_frames(given, _FRAMES_ALIASES, self.limits)
        input_id = given.text("input_id", max_bytes=self.limits.text_bytes)
        response_id = given.text("response_id", max_bytes=self.limits.text_bytes)
        is_tagged = input_id is not None or response_id is not None
        audio = b""
        if not is_of_pictures_alone(frames, given, *_AUDIO_ALIASES):
            audio = _read_audio(given, self.limits.append_s)
        return Append(
            audio=audio,
            force_listen=force_listen or False,
            tag=Tag(input_id, response_id) if is_tagged else NO_TAG,
            frames=frames,
            max_slice_count=self._slice_count(given, hints) if frames else None,
        )

    def _slice_count(self, given: Fields, hints: Fields | None) -> int | None:
        hinted = read_slice_count(hints) if hints else None
        return read_slice_count(given) or hinted or self._max_slice_count

    def _event(self, kind: str, now: Moment) -> dict[str, object]:
        return {
            "type": kind,
            "session_id": self.identity.session_id,
            "server_send_ts": now.wall_s,
        }

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        self._usage.input_text += opened.prompt_token_count
        self._context_token_count = opened.prompt_token_count
        event = self._event("session.created", now)
        event["mode"] = self.backend_mode
        event["prompt_length"] = opened.prompt_token_count
        event["metrics"] = {"kv_cache_length": opened.prompt_token_count}
        event["usage"] = self._usage.to_json()
        if self.identity.recording_id:
            event["recording_session_id"] = self.identity.recording_id
        if ignored := [*self._ignored, *opened.ignored_fields]:
            event["ignored_init_fields"] = ignored
        return [orjson.dumps(event)]

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped_count: int, now: Moment
    ) -> list[bytes]:
        """Render a unit: `listen`, or `text` and `audio`, and a `listen` that ends the turn.

        A spoken unit without text or audio is an empty `text`, so that every unit is answered.
        """
        is_speech = delta.WhichOneof("outcome") == "speech"
        self._context_token_count = delta.context_token_count
        event = self._delta_event(tag, now)
        if is_speech:
            self._turn_id = tag.response_id or self._turn_id or f"resp_{self._new_id()}"
        if self._turn_id is not None and (is_speech or delta.end_of_turn):
            event["response_id"] = self._turn_id
        # Rendered once for all of the unit's events.
        event["metrics"] = orjson.Fragment(orjson.dumps(metrics(delta, dropped_count)))
        counts = self._count(delta.token_counts)  # only on the first event of a unit
        events: list[bytes] = []
        if is_speech and (delta.speech.text or not (delta.speech.audio or delta.end_of_turn)):
            text = {"kind": "text", "text": delta.speech.text}
            events.append(orjson.dumps({**event, **text, **counts}))
            counts = {}
        if is_speech and delta.speech.audio:
            events.append(with_audio({**event, "kind": "audio", **counts}, delta.speech.audio))
            counts = {}
        if delta.end_of_turn or not is_speech:
            events.append(orjson.dumps({**event, "kind": "listen", **counts}))
        if delta.end_of_turn:
            self._turn_id = None
        return events

    def _delta_event(self, tag: Tag, now: Moment) -> dict[str, object]:
        event = self._event("response.output.delta", now)
        if tag.input_id is not None:
            event["input_id"] = tag.input_id
        return event

    def gathered(self, tag: Tag, now: Moment) -> list[bytes]:
        """Answer an append that completed no unit by the state that it left: nothing has changed.

        A `listen` would end an open turn, so that one goes on with an empty `text`.
        """
        if self.phase is not Phase.ACTIVE:
            return []
        event = self._delta_event(tag, now)
        event["metrics"] = metrics(
            session_pb2.Delta(context_token_count=self._context_token_count), dropped_count=0
        )
        if self._turn_id is None:
            event["kind"] = "listen"
        else:
            event.update(kind="text", text="", response_id=self._turn_id)
        return [orjson.dumps(event)]

    def _count(self, token_counts: session_pb2.TokenCounts) -> dict[str, object]:
        used = Usage.of_unit(token_counts)
        self._usage.add(used)
        index, self._chunk_index = self._chunk_index, self._chunk_index + 1
        return {
            "chunk_index": index,
            "chunk_usage": used.to_json(),
            "usage": self._usage.to_json(),
        }

    def _closed_events(self, ending: Ending, now: Moment) -> list[bytes]:
        reason = CLOSED_REASONS.get(ending.end)
        if reason is None:
            return []
        event = self._event("session.closed", now)
        event["reason"] = ending.client_reason or reason
        event["usage"] = self._usage.to_json()
        if ending.end is End.FAILED:
            event["diagnostic"] = {"message": ending.message or "the worker was lost"}
        return [orjson.dumps(event)]

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event."""
        event = self._event("error", now)
        if input_id is not None:
            event["input_id"] = input_id
        event["error"] = {"code": code, "message": message, "type": code.fault}
        return orjson.dumps(event)


def _read_audio(given: Fields, max_s: float) -> bytes:
    key = given.first(*_AUDIO_ALIASES)
    if key is None:
        raise missing(given.path("audio"))
    if isinstance(given.get(key), str):
        return decode_audio(given.required_text(key), given.path(key), max_s)
    nested = given.fields(key)
    inner = nested.first(*_AUDIO_OBJECT_ALIASES) if nested else None
    if nested is None or inner is None:
        raise invalid(given.path(key), "must be base64 text, or an object with `data`")
    return decode_audio(nested.required_text(inner), nested.path(inner), max_s)
