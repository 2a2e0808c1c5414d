"""Dialect C: `prepare`, `audio_chunk`, and one `result` for each chunk; errors are flat text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from duplane.edge.client_errors import RESUME_CODES, ClientError, ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects import speech
from duplane.edge.dialects.actions import (
    NOTHING_DROPPED,
    Action,
    Append,
    Configure,
    Dropped,
    Leave,
    Reply,
    Speak,
    SpeechEnding,
    Tag,
)
from duplane.edge.dialects.dialect import (
    ALIVE,
    OPEN,
    WAITING,
    Decoders,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
    queue_events,
    with_optional_audio,
)
from duplane.edge.dialects.duplex import DuplexDialect, RestoredSettings, drop_metrics
from duplane.edge.dialects.resumption import read_resumption
from duplane.edge.dialects.unit_metrics import FRAME_SLICE_TOKENS, listen_metrics, stage_metrics
from duplane.edge.payload.fields import BASE64, Fields, ignored
from duplane.edge.payload.media import decode_audio, read_voice
from duplane.edge.payload.model_settings import read_duplex_config
from duplane.edge.payload.pictures import read_frames, read_slice_count
from duplane.fabric.durations import to_duration, to_seconds
from duplane.fabric.v1 import session_pb2

PREPARE = "prepare"
CHUNK = "audio_chunk"
PAUSE = "pause"
RESUME = "resume"
INTERRUPT = "interrupt"
STOP = "stop"
DIAGNOSTIC = "client_diagnostic"

DEFAULT_PROMPT = "You are a helpful assistant."
DEFAULT_PAUSE_S = 60.0


class DialectC(DuplexDialect):
    """One client that speaks C."""

    name: ClassVar[str] = "C"
    queue_prefix: ClassVar[str] = ""
    return_event: ClassVar[str] = "resume"
    replies_to_appends: ClassVar[bool] = True
    unit_paths: ClassVar[Mapping[str, str]] = {
        "audio": "audio_base64",
        "video_frames": "frame_base64_list",
    }
    transitions: ClassVar[Transitions] = {
        (Phase.START, PREPARE): Phase.OPENING,
        (Phase.START, DIAGNOSTIC): Phase.START,
        (Phase.START, STOP): Phase.CLOSED,
        (Phase.OPENING, CHUNK): Phase.OPENING,  # the audio waits until the conversation is ready
        (Phase.OPENING, INTERRUPT): Phase.OPENING,
        (Phase.OPENING, speech.REQUEST): Phase.OPENING,
        (Phase.OPENING, DIAGNOSTIC): Phase.OPENING,
        (Phase.OPENING, STOP): Phase.CLOSED,
        (Phase.ACTIVE, CHUNK): Phase.ACTIVE,
        (Phase.ACTIVE, PAUSE): Phase.PAUSED,
        (Phase.ACTIVE, RESUME): Phase.ACTIVE,
        (Phase.ACTIVE, INTERRUPT): Phase.ACTIVE,
        (Phase.ACTIVE, speech.REQUEST): Phase.ACTIVE,
        (Phase.ACTIVE, DIAGNOSTIC): Phase.ACTIVE,
        (Phase.ACTIVE, STOP): Phase.CLOSED,
        (Phase.PAUSED, PAUSE): Phase.PAUSED,  # the pause starts again
        (Phase.PAUSED, RESUME): Phase.ACTIVE,
        (Phase.PAUSED, INTERRUPT): Phase.PAUSED,
        (Phase.PAUSED, speech.REQUEST): Phase.PAUSED,
        (Phase.PAUSED, DIAGNOSTIC): Phase.PAUSED,
        (Phase.PAUSED, STOP): Phase.CLOSED,
    }
    replies: ClassVar[Replies] = {
        PREPARE: ("prepared",),
        CHUNK: ("result",),
        PAUSE: ("paused",),
        RESUME: ("resumed",),
        INTERRUPT: ("interrupted",),
        speech.REQUEST: (speech.DONE,),
        DIAGNOSTIC: (),
        STOP: ("stopped",),
    }
    server_events: ClassVar[ServerEvents] = {
        **queue_events("", WAITING),
        "prepared": frozenset({Phase.OPENING}),
        "result": OPEN,
        speech.DONE: OPEN,
        "moving": OPEN,
        "paused": OPEN,
        "resumed": OPEN,
        "interrupted": OPEN | {Phase.OPENING},
        "stopped": ALIVE,
        "timeout": ALIVE,
        "error": ALIVE,
    }
    _pause_s: float = DEFAULT_PAUSE_S
    _result_count = 0

    # --- client events ---

    def _refusal(self, kind: str, phase: Phase) -> ClientError:
        if all(kind != known for _, known in self.transitions):
            return ClientError(ErrorCode.UNKNOWN_EVENT, f"Unknown message type: {kind[:80]}")
        if phase is Phase.PAUSED and kind == CHUNK:
            return ClientError(ErrorCode.NOT_READY, "Worker is paused")
        if kind == PREPARE:
            return ClientError(ErrorCode.UNKNOWN_EVENT, "Already prepared")
        return ClientError(ErrorCode.NOT_READY, f"Not prepared: {kind}")

    def _event_decoders(self) -> Decoders:
        return {
            CHUNK: self._decode_chunk,
            PREPARE: self._decode_settings,
            PAUSE: self._decode_pause,
            RESUME: self._decode_resume,
            INTERRUPT: lambda _: Reply((_event("interrupted"),), kind=INTERRUPT, is_interrupt=True),
            speech.REQUEST: lambda event: speech.read_speech(event, self.limits),
            DIAGNOSTIC: lambda _: Reply(kind=DIAGNOSTIC),  # accepted without effect
            STOP: lambda _: Leave(kind=STOP),
        }

    def accept(self, action: Action) -> None:
        """Apply a decoded event, except an append. Call this before the next event is decoded."""
        super().accept(action)
        if isinstance(action, Reply) and action.request and action.request.HasField("pause"):
            self._pause_s = to_seconds(action.request.pause.timeout)

    def _decode_pause(self, event: Fields) -> Reply:
        timeout_s = event.number("timeout", 0.0, self.limits.pause_s)
        pause_s = DEFAULT_PAUSE_S if timeout_s is None else timeout_s
        pause = session_pb2.Pause(timeout=to_duration(pause_s))
        request = session_pb2.ConverseRequest(pause=pause)
        return Reply((_event("paused", timeout=pause_s),), request, PAUSE)

    def _decode_resume(self, event: Fields) -> Reply:
        """Resume a paused session.

        A session that is not paused gets the same reply: clients expect it.
        """
        del event
        request = session_pb2.ConverseRequest(resume=session_pb2.Resume())
        return Reply((_event("resumed"),), request if self.phase is Phase.PAUSED else None, RESUME)

    def _decode_settings(self, event: Fields) -> Configure:
        prompt = event.text("system_prompt", self.limits.instructions_bytes)
        settings = session_pb2.Open(
            system_prompt=DEFAULT_PROMPT if prompt is None else prompt,
            llm_voice=read_voice(event, "ref_audio_base64", self.limits.voice_s),
            tts_voice=read_voice(event, "tts_ref_audio_base64", self.limits.voice_s),
        )
        config = event.fields("config")
        paths = {"llm_voice": "ref_audio_base64", "tts_voice": "tts_ref_audio_base64"}
        if config is not None:
            paths |= read_duplex_config(config, settings.config)
        max_slice_count = None
        if self.mode.takes_frames:
            configured = read_slice_count(config) if config else None
            max_slice_count = read_slice_count(event) or configured
        resumption = read_resumption(event, self.limits)
        return Configure(
            settings, max_slice_count, ignored(event, config), paths, PREPARE, resumption=resumption
        )

    def _decode_chunk(self, event: Fields) -> Append:
        encoded = event.get("audio_base64", BASE64)
        if not encoded:
            raise ClientError(ErrorCode.MISSING_FIELD, "Missing audio_base64")
        audio = decode_audio(encoded, "audio_base64", self.limits.append_s)
        frames: tuple[bytes, ...] = ()
        if self.mode.takes_frames:
            frames = read_frames(event, ("frame_base64_list",), self.limits)
        slices = (read_slice_count(event) or self._max_slice_count) if frames else None
        force_listen = event.get("force_listen", bool) or False
        return Append(audio, force_listen, frames=frames, max_slice_count=slices, kind=CHUNK)

    # --- server events ---

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        del now
        fields: dict[str, object] = {
            "prompt_length": opened.prompt_token_count,
            **self._model_fields,
            **self.identity.recording_field,
        }
        if self.identity.recording_id:
            fields["recording_session_id"] = self.identity.recording_id
        if without_effect := self._without_effect(opened):
            fields["ignored_init_fields"] = without_effect
        return [_event("prepared", **fields)]

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped: Dropped, now: Moment
    ) -> list[bytes]:
        """Render the reply to one chunk: one `result`."""
        del tag
        times = stage_metrics(delta.stage_times)
        counts = delta.token_counts
        is_speech = delta.WhichOneof("outcome") == "speech"
        self._result_count += 1
        event: dict[str, object] = {
            "type": "result",
            "is_listen": not is_speech,
            "text": delta.speech.text if is_speech else "",
            "end_of_turn": delta.end_of_turn,
            "current_time": self._result_count,
            "cost_llm_ms": times["cost_llm_ms"],
            "cost_tts_prep_ms": times["cost_tts_prep_ms"],
            "cost_tts_ms": times["cost_tts_ms"],
            "cost_token2wav_ms": times["cost_token2wav_ms"],
            "cost_all_ms": times["prefill_ms"] + times["generate_ms"],
            "n_tokens": counts.output_text_token_count,
            "n_tts_tokens": counts.output_audio_token_count,
            "server_send_ts": now.wall_s,
            "wall_clock_ms": times["wall_clock_ms"],
            "kv_cache_length": delta.context_token_count,
            "vision_slices": counts.input_video_token_count // FRAME_SLICE_TOKENS,
            "vision_tokens": counts.input_video_token_count,
        }
        if delta.HasField("listen_probability"):
            event |= listen_metrics(delta)
        if delta.interrupted_turn:
            event["interrupted"] = True
        if dropped != NOTHING_DROPPED:
            event |= drop_metrics(dropped)
        return [with_optional_audio(event, self._speech_audio(delta))]

    def state(self) -> Sequence[object]:
        """Return the number of results, and the longest pause."""
        return (self._result_count, self._pause_s)

    def restore(self, state: Sequence[Any], settings: RestoredSettings) -> None:
        """Go on as the dialect whose state this is."""
        super().restore(state, settings)
        self._result_count, self._pause_s = state

    def speech_ended(
        self, speak: Speak, ending: SpeechEnding, message: str, now: Moment
    ) -> list[bytes]:
        """Render `speech.done`."""
        del now
        return [orjson.dumps(speech.done_fields(speak, ending, message))]

    def moving(self, within_s: float, now: Moment) -> list[bytes]:
        """Render `moving`, which clients may ignore."""
        del now
        return [_event("moving", within_s=within_s)]

    def _closed_events(self, close: Close, now: Moment) -> list[bytes]:
        match close.reason:
            case CloseReason.CLIENT:
                return [_event("stopped")]
            case CloseReason.TIMEOUT:
                is_pause = self.phase is Phase.PAUSED
                pause = f"Pause timeout ({self._pause_s}s)"
                reason = pause if is_pause else close.message or "Session timeout"
                return [_event("timeout", reason=reason)]
            case CloseReason.CONTEXT_FULL:
                return [self.error(ErrorCode.INFERENCE_ERROR, "Context is full", now)]
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
        """Render an `error` event; C has no error codes and no input ids.

        Only a client that returns needs a code, so its errors begin with that.
        """
        del now, input_id
        if code in RESUME_CODES:
            message = f"{code}: {message}"
        return _event("error", error=message)


def _event(kind: str, **fields: object) -> bytes:
    return orjson.dumps({"type": kind, **fields})
