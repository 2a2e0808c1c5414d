"""Dialect A: `session.update`, `input_audio_buffer.append`, `response.output_audio.delta`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import orjson

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects import speech
from duplane.edge.dialects.actions import (
    Append,
    Configure,
    Dropped,
    Leave,
    Speak,
    SpeechEnding,
    Tag,
)
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
from duplane.edge.dialects.duplex import DuplexDialect, drop_metrics
from duplane.edge.dialects.resumption import read_resumption
from duplane.edge.dialects.unit_metrics import listen_metrics
from duplane.edge.payload.fields import BASE64, Fields, ignored, invalid
from duplane.edge.payload.media import decode_audio, read_voice
from duplane.edge.payload.model_settings import read_duplex_config
from duplane.edge.payload.pictures import read_frames, read_slice_count
from duplane.fabric.v1 import session_pb2

UPDATE = "session.update"
APPEND = "input_audio_buffer.append"
CLOSE = "session.close"

CLOSED_REASONS: Mapping[CloseReason, str] = {
    CloseReason.CLIENT: "stopped",
    CloseReason.TIMEOUT: "timeout",
    CloseReason.CONTEXT_FULL: "context_full",
    CloseReason.SHUTDOWN: "server_shutdown",
    CloseReason.FAILED: "error",
}


class DialectA(DuplexDialect):
    """One client that speaks A."""

    name: ClassVar[str] = "A"
    return_event: ClassVar[str] = "session.resume"
    lost_while_opening: ClassVar[CloseReason] = CloseReason.WORKER_CONNECT_FAILED
    transitions: ClassVar[Transitions] = {
        (Phase.START, UPDATE): Phase.OPENING,
        (Phase.START, CLOSE): Phase.CLOSED,
        (Phase.OPENING, APPEND): Phase.OPENING,  # the audio waits until the conversation is ready
        (Phase.OPENING, speech.REQUEST): Phase.OPENING,
        (Phase.OPENING, CLOSE): Phase.CLOSED,
        (Phase.ACTIVE, APPEND): Phase.ACTIVE,
        (Phase.ACTIVE, speech.REQUEST): Phase.ACTIVE,
        (Phase.ACTIVE, CLOSE): Phase.CLOSED,
    }
    replies: ClassVar[Replies] = {
        UPDATE: ("session.created",),
        APPEND: ("response.listen", "response.output_audio.delta"),
        speech.REQUEST: (speech.DONE,),
        CLOSE: ("session.closed",),
    }
    server_events: ClassVar[ServerEvents] = {
        **queue_events("session.", WAITING),
        "session.created": frozenset({Phase.OPENING}),
        "response.listen": frozenset({Phase.ACTIVE}),
        "response.output_audio.delta": frozenset({Phase.ACTIVE}),
        speech.DONE: frozenset({Phase.ACTIVE}),
        "session.closed": ALIVE,
        "error": ALIVE,
    }

    def _event_decoders(self) -> Decoders:
        return {
            APPEND: self._decode_append,
            UPDATE: self._decode_settings,
            speech.REQUEST: lambda event: speech.read_speech(event, self.limits),
            CLOSE: self._decode_close,
        }

    def _decode_append(self, event: Fields) -> Append:
        frames: tuple[bytes, ...] = ()
        if self.mode.takes_frames:
            frames = read_frames(event, ("video_frames",), self.limits)
        audio = b""
        if not frames or event.first("audio"):  # pictures may come alone
            encoded = event.get("audio", BASE64, required=True)
            audio = decode_audio(encoded, "audio", self.limits.append_s)
        return Append(
            audio=audio,
            force_listen=event.get("force_listen", bool) or False,
            frames=frames,
            max_slice_count=(read_slice_count(event) or self._max_slice_count) if frames else None,
            kind=APPEND,
        )

    def _decode_close(self, event: Fields) -> Leave:
        return Leave(event.shortened_text("reason", self.limits.text_bytes), CLOSE)

    def _decode_settings(self, event: Fields) -> Configure:
        session = event.required_fields("session")
        instructions = session.required_text("instructions", self.limits.instructions_bytes)
        if not instructions:
            raise invalid(session.path("instructions"), "must not be empty")
        settings = session_pb2.Open(
            system_prompt=instructions,
            llm_voice=read_voice(session, "ref_audio", self.limits.voice_s),
            tts_voice=read_voice(session, "tts_ref_audio", self.limits.voice_s),
            context_token_limit=self.limits.context_token_count,
        )
        max_slice_count = read_slice_count(session) if self.mode.takes_frames else None
        # This field is not in the specification, but existing clients send it.
        paths = {
            "system_prompt": session.path("instructions"),
            "llm_voice": session.path("ref_audio"),
            "tts_voice": session.path("tts_ref_audio"),
        }
        if (config := session.fields("voice_config")) is not None:
            paths |= read_duplex_config(config, settings.config)
        resumption = read_resumption(session, self.limits)
        return Configure(
            settings,
            max_slice_count,
            ignored(session, config),
            paths,
            UPDATE,
            resumption=resumption,
        )

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        del now
        event: dict[str, object] = {
            "type": "session.created",
            "session_id": self.identity.realtime_id,
            "prompt_length": opened.prompt_token_count,
            **self._model_fields,
            **self._unit_fields,
            **self.identity.recording_field,
        }
        if self.identity.recording_id:
            event["recording_session_id"] = self.identity.recording_id
        if without_effect := self._without_effect(opened):
            event["ignored_init_fields"] = without_effect
        return [orjson.dumps(event)]

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped: Dropped, now: Moment
    ) -> list[bytes]:
        """Render a unit as one `response.listen` or one `response.output_audio.delta`."""
        del tag, now
        event: dict[str, object] = {
            "type": "response.listen",
            "kv_cache_length": delta.context_token_count,
        }
        if measured := drop_metrics(dropped) | listen_metrics(delta):
            event["metrics"] = measured
        audio = self._speech_audio(delta)
        if delta.WhichOneof("outcome") != "speech":
            if delta.end_of_turn:
                event["end_of_turn"] = True
            if delta.interrupted_turn:
                event["interrupted"] = True
            return [orjson.dumps(event)]
        event["type"] = "response.output_audio.delta"
        event["text"] = delta.speech.text
        event["end_of_turn"] = delta.end_of_turn
        return [with_audio(event, audio)]

    def speech_ended(
        self, speak: Speak, ending: SpeechEnding, message: str, now: Moment
    ) -> list[bytes]:
        """Render `speech.done`."""
        del now
        return [orjson.dumps(speech.done_fields(speak, ending, message))]

    def _closed_events(self, close: Close, now: Moment) -> list[bytes]:
        del now
        reason = CLOSED_REASONS.get(close.reason)
        if reason is None:
            return []
        return [orjson.dumps({"type": "session.closed", "reason": reason})]

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event; inputs have no ids in A."""
        del now, input_id
        error = {"code": code, "message": message, "type": code.fault}
        return orjson.dumps({"type": "error", "error": error})
