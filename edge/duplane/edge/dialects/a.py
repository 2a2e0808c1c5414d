"""Dialect A: `session.update`, `input_audio_buffer.append`, `response.output_audio.delta`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import orjson

from duplane.edge.dialects.dialect import (
    ALIVE,
    WAITING,
    Action,
    Answers,
    Append,
    Configure,
    Dialect,
    Leave,
    Moment,
    Phase,
    ServerEvents,
    Tag,
    Transitions,
    queue_events,
    with_audio,
)
from duplane.edge.dialects.duplex_config import read_duplex_config
from duplane.edge.dialects.fields import Fields, ignored, invalid
from duplane.edge.dialects.frames import is_of_pictures_alone, read_frames, read_slice_count
from duplane.edge.dialects.media import decode_audio, read_voice
from duplane.edge.ends import End, Ending
from duplane.edge.faults import ErrorCode
from duplane.fabric.v1 import session_pb2

UPDATE = "session.update"
APPEND = "input_audio_buffer.append"
CLOSE = "session.close"

CLOSED_REASONS: Mapping[End, str] = {
    End.CLIENT: "stopped",
    End.TIMEOUT: "timeout",
    End.CONTEXT_FULL: "context_full",
    End.SHUTDOWN: "server_shutdown",
    End.FAILED: "error",
}


class DialectA(Dialect):
    """One client that speaks A."""

    name: ClassVar[str] = "A"
    _max_slice_count: int | None = None  # of appends that name none
    _ignored: tuple[str, ...] = ()  # paths of settings that have no effect
    lost_while_opening: ClassVar[End] = End.WORKER_CONNECT_FAILED
    transitions: ClassVar[Transitions] = {
        (Phase.START, UPDATE): Phase.OPENING,
        (Phase.START, CLOSE): Phase.CLOSED,
        (Phase.OPENING, APPEND): Phase.OPENING,  # held until the conversation is ready
        (Phase.OPENING, CLOSE): Phase.CLOSED,
        (Phase.ACTIVE, APPEND): Phase.ACTIVE,
        (Phase.ACTIVE, CLOSE): Phase.CLOSED,
    }
    answers: ClassVar[Answers] = {
        UPDATE: ("session.created",),
        APPEND: ("response.listen", "response.output_audio.delta"),
        CLOSE: ("session.closed",),
    }
    server_events: ClassVar[ServerEvents] = {
        **queue_events("session.", WAITING),
        "session.created": frozenset({Phase.OPENING}),
        "response.listen": frozenset({Phase.ACTIVE}),
        "response.output_audio.delta": frozenset({Phase.ACTIVE}),
        "session.closed": ALIVE,
        "error": ALIVE,
    }

    def _read(self, kind: str, event: Fields) -> Action:
        if kind == APPEND:
            return self._read_append(event)
        if kind == UPDATE:
            return Configure(self._settings(event.required_fields("session")))
        return Leave(event.text("reason", max_bytes=self.limits.text_bytes) or "")

    def _read_append(self, event: Fields) -> Append:
        frames: tuple[bytes, ...] = ()
        if self.mode.takes_frames:
            frames = read_frames(event, ("video_frames",), self.limits)
        audio = b""
        if not is_of_pictures_alone(frames, event, "audio"):
            audio = decode_audio(event.required_text("audio"), "audio", self.limits.append_s)
        return Append(
            audio=audio,
            force_listen=event.flag("force_listen") or False,
            frames=frames,
            max_slice_count=(read_slice_count(event) or self._max_slice_count) if frames else None,
        )

    def _settings(self, session: Fields) -> session_pb2.Open:
        instructions = session.required_text(
            "instructions", max_bytes=self.limits.instructions_bytes
        )
        if not instructions:
            raise invalid(session.path("instructions"), "must not be empty")
        settings = session_pb2.Open(
            system_prompt=instructions,
            llm_voice=read_voice(session, "ref_audio", self.limits.voice_s),
            tts_voice=read_voice(session, "tts_ref_audio", self.limits.voice_s),
            context_token_limit=self.limits.context_token_count,
        )
        if self.mode.takes_frames:
            self._max_slice_count = read_slice_count(session)
        # Documented nowhere, sent by clients in the wild.
        if (config := session.fields("voice_config")) is not None:
            read_duplex_config(config, settings.config)
        self._ignored = ignored(session, config)
        return settings

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        del now
        event: dict[str, object] = {
            "type": "session.created",
            "session_id": self.identity.realtime_id,
            "prompt_length": opened.prompt_token_count,
        }
        if self.identity.recording_id:
            event["recording_session_id"] = self.identity.recording_id
        if unheeded := [*self._ignored, *opened.ignored_fields]:
            event["ignored_init_fields"] = unheeded
        return [orjson.dumps(event)]

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped_count: int, now: Moment
    ) -> list[bytes]:
        """Render a unit as one `response.listen` or one `response.output_audio.delta`."""
        del tag, now
        event: dict[str, object] = {
            "type": "response.listen",
            "kv_cache_length": delta.context_token_count,
        }
        if dropped_count:
            event["metrics"] = {"dropped_units": dropped_count}
        if delta.WhichOneof("outcome") != "speech":
            return [orjson.dumps(event)]
        event["type"] = "response.output_audio.delta"
        event["text"] = delta.speech.text
        event["end_of_turn"] = delta.end_of_turn
        return [with_audio(event, delta.speech.audio)]

    def _closed_events(self, ending: Ending, now: Moment) -> list[bytes]:
        del now
        reason = CLOSED_REASONS.get(ending.end)
        if reason is None:
            return []
        return [orjson.dumps({"type": "session.closed", "reason": reason})]

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event; inputs have no names here."""
        del now, input_id
        error = {"code": code, "message": message, "type": code.fault}
        return orjson.dumps({"type": "error", "error": error})
