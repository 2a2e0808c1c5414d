"""Dialect H, half duplex: the edge hears when the client has spoken, and the model answers."""

from __future__ import annotations

from typing import ClassVar

import orjson

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.actions import Append, Configure, Leave, Turn
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.dialect import (
    ALIVE,
    WAITING,
    Decoders,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
    queue_events,
    with_optional_audio,
)
from duplane.edge.dialects.h_settings import HalfDuplexSettings, read_prepare
from duplane.edge.identity import Identity
from duplane.edge.modes import Mode
from duplane.edge.payload.fields import BASE64, Fields
from duplane.edge.payload.media import decode_audio
from duplane.edge.payload.rates import OUTPUT_RATE_HERTZ
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

PREPARE = "prepare"
CHUNK = "audio_chunk"
STOP = "stop"

_SPOKEN = frozenset({Phase.ACTIVE})


class DialectH(ChatDialect):
    """One client that speaks H. Its turns begin when the session has heard a piece of speech."""

    name: ClassVar[str] = "H"
    queue_prefix: ClassVar[str] = ""
    transitions: ClassVar[Transitions] = {
        (Phase.START, PREPARE): Phase.OPENING,
        (Phase.START, STOP): Phase.CLOSED,
        (Phase.OPENING, PREPARE): Phase.OPENING,  # the last settings count
        (Phase.OPENING, CHUNK): Phase.OPENING,  # not heard
        (Phase.OPENING, STOP): Phase.CLOSED,
        (Phase.ACTIVE, PREPARE): Phase.ACTIVE,  # the conversation begins again
        (Phase.ACTIVE, CHUNK): Phase.ACTIVE,
        (Phase.ACTIVE, STOP): Phase.CLOSED,
    }
    replies: ClassVar[Replies] = {
        PREPARE: ("prepared", "vad_state"),
        CHUNK: ("vad_state", "generating", "chunk", "turn_done"),
        STOP: ("stopped",),
    }
    server_events: ClassVar[ServerEvents] = {
        **queue_events("", WAITING | _SPOKEN),  # for each turn
        "prepared": frozenset({Phase.OPENING, Phase.ACTIVE}),
        "vad_state": _SPOKEN,
        "generating": _SPOKEN,
        "chunk": _SPOKEN,
        "turn_done": _SPOKEN,
        "stopped": ALIVE,
        "timeout": ALIVE,
        "error": ALIVE,
    }

    def __init__(self, identity: Identity, limits: Limits, mode: Mode) -> None:
        super().__init__(identity, limits, mode)
        self.settings = HalfDuplexSettings(session_pb2.Open())
        self._turn_count = 0  # answered turns
        self._chunk_count = 0  # of this turn
        self._chunk_s = 0.0  # monotonic time of the last chunk

    @property
    def idle_s(self) -> float:
        """How long a client may send no sound while no turn runs."""
        return min(self.settings.timeout_s, self.limits.idle_s)

    # --- client events ---

    def _refusal(self, kind: str, phase: Phase) -> ClientError:
        if all(kind != known for _, known in self.transitions):
            return ClientError(ErrorCode.UNKNOWN_EVENT, f"Unknown message type: {kind[:80]}")
        del phase
        return ClientError(ErrorCode.NOT_READY, f"Not prepared: {kind}")

    def _event_decoders(self) -> Decoders:
        return {
            PREPARE: lambda event: read_prepare(event, self.limits, PREPARE),
            CHUNK: self._decode_chunk,
            STOP: lambda _: Leave(kind=STOP),
        }

    def _decode_chunk(self, event: Fields) -> Append:
        encoded = event.get("audio_base64", BASE64)
        if not encoded:
            raise ClientError(ErrorCode.MISSING_FIELD, "Missing audio_base64")
        return Append(decode_audio(encoded, "audio_base64", self.limits.append_s), kind=CHUNK)

    def _configure(self, settings: Configure) -> None:
        super()._configure(settings)
        if isinstance(settings, HalfDuplexSettings):
            self.settings = settings

    # --- server events ---

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        del opened, now
        return self.prepared()

    def prepared(self) -> list[bytes]:
        """Render the event that the session hears the client from now on."""
        fields: dict[str, object] = {
            "session_id": self.identity.url_id,
            "timeout_s": self.idle_s,
            **self._model_fields,
            **self.identity.recording_field,
        }
        if self.identity.recording_id:
            fields["recording_session_id"] = self.identity.recording_id
        if self._ignored:
            fields["ignored_init_fields"] = self._ignored
        return [_event("prepared", **fields)]

    def vad_state(self, *, is_speaking: bool) -> bytes:
        """Render the begin or the end of the client's speech."""
        return _event("vad_state", speaking=is_speaking)

    def generating(self, speech_ms: int) -> bytes:
        """Render the event that a turn has its slot."""
        return _event("generating", speech_duration_ms=speech_ms)

    def begin(self, turn: Turn, now: Moment) -> None:
        """Begin to answer a turn, or begin again on another slot."""
        super().begin(turn, now)
        self._chunk_count = 0
        self._chunk_s = now.monotonic_s

    def _delta_events(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        if not (delta.text or delta.audio):
            return []
        return [self._chunk(delta.text, delta.audio, now)]

    def _chunk(self, text: str, audio: bytes, now: Moment, *, is_final: bool = False) -> bytes:
        event: dict[str, object] = {
            "type": "chunk",
            "chunk_index": self._chunk_count,
            "text_delta": text or None,
            "audio_sample_rate": OUTPUT_RATE_HERTZ,
            "is_final": is_final,
            "duration_ms": round((now.monotonic_s - self._chunk_s) * 1000, 1),
        }
        self._chunk_count += 1
        self._chunk_s = now.monotonic_s
        return with_optional_audio(event, audio)

    @property
    def answer_text(self) -> str:
        """The text of the answer so far."""
        return "".join(self._text)

    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render the last chunk, which is empty, and `turn_done`."""
        del done
        self._turn_count += 1
        fields: dict[str, object] = {"turn_index": self._turn_count, "text": self.answer_text}
        if without_effect := self._without_effect():
            fields["ignored_fields"] = without_effect
        return [self._chunk("", b"", now, is_final=True), _event("turn_done", **fields)]

    def _closed_events(self, close: Close, now: Moment) -> list[bytes]:
        match close.reason:
            case CloseReason.CLIENT:
                return [_event("stopped")]
            case CloseReason.TIMEOUT:
                is_prepared = self.phase is not Phase.START
                return [
                    _event("timeout", elapsed_s=self.idle_s if is_prepared else self.limits.init_s)
                ]
            case CloseReason.SHUTDOWN:
                return [self.error(ErrorCode.SERVICE_UNAVAILABLE, "Server is shutting down", now)]
            case CloseReason.FAILED:
                message = close.message or "the worker was lost"
                return [self.error(ErrorCode.INFERENCE_ERROR, message, now)]
            case _:
                return []

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event; H has no error codes and no input ids."""
        del code, now, input_id
        return _event("error", error=message)


def _event(kind: str, **fields: object) -> bytes:
    return orjson.dumps({"type": kind, **fields})
