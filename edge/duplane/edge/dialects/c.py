"""Dialect C: `prepare`, `audio_chunk`, and one `result` for each; errors are flat text."""

from __future__ import annotations

from typing import ClassVar

import orjson

from duplane.edge.dialects.b_metrics import metrics
from duplane.edge.dialects.dialect import (
    ALIVE,
    OPEN,
    WAITING,
    Action,
    Answer,
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
from duplane.edge.dialects.fields import Fields, ignored
from duplane.edge.dialects.frames import read_frames, read_slice_count
from duplane.edge.dialects.media import decode_audio, read_voice
from duplane.edge.ends import End, Ending
from duplane.edge.faults import ClientError, ErrorCode
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
_UNCOUNTED = {"vision_slices": 0, "vision_tokens": 0}


class DialectC(Dialect):
    """One client that speaks C."""

    name: ClassVar[str] = "C"
    queue_prefix: ClassVar[str] = ""
    answers_appends: ClassVar[bool] = True
    lost_while_opening: ClassVar[End] = End.FAILED
    transitions: ClassVar[Transitions] = {
        (Phase.START, PREPARE): Phase.OPENING,
        (Phase.START, DIAGNOSTIC): Phase.START,
        (Phase.START, STOP): Phase.CLOSED,
        (Phase.OPENING, CHUNK): Phase.OPENING,  # held until the conversation is ready
        (Phase.OPENING, INTERRUPT): Phase.OPENING,
        (Phase.OPENING, DIAGNOSTIC): Phase.OPENING,
        (Phase.OPENING, STOP): Phase.CLOSED,
        (Phase.ACTIVE, CHUNK): Phase.ACTIVE,
        (Phase.ACTIVE, PAUSE): Phase.PAUSED,
        (Phase.ACTIVE, RESUME): Phase.ACTIVE,
        (Phase.ACTIVE, INTERRUPT): Phase.ACTIVE,
        (Phase.ACTIVE, DIAGNOSTIC): Phase.ACTIVE,
        (Phase.ACTIVE, STOP): Phase.CLOSED,
        (Phase.PAUSED, PAUSE): Phase.PAUSED,  # begins anew
        (Phase.PAUSED, RESUME): Phase.ACTIVE,
        (Phase.PAUSED, INTERRUPT): Phase.PAUSED,
        (Phase.PAUSED, DIAGNOSTIC): Phase.PAUSED,
        (Phase.PAUSED, STOP): Phase.CLOSED,
    }
    answers: ClassVar[Answers] = {
        PREPARE: ("prepared",),
        CHUNK: ("result",),
        PAUSE: ("paused",),
        RESUME: ("resumed",),
        INTERRUPT: ("interrupted",),
        DIAGNOSTIC: (),
        STOP: ("stopped",),
    }
    server_events: ClassVar[ServerEvents] = {
        **queue_events("", WAITING),
        "prepared": frozenset({Phase.OPENING}),
        "result": OPEN,
        "paused": OPEN,
        "resumed": OPEN,
        "interrupted": OPEN | {Phase.OPENING},
        "stopped": ALIVE,
        "timeout": ALIVE,
        "error": ALIVE,
    }
    _max_slice_count: int | None = None  # of chunks that name none
    _ignored: tuple[str, ...] = ()  # paths of settings that have no effect
    _pause_s: float = DEFAULT_PAUSE_S
    _is_interrupted = False  # the next unit has to listen
    _result_count = 0

    def _refusal(self, kind: str) -> ClientError:
        if all(kind != known for _, known in self.transitions):
            return ClientError(ErrorCode.UNKNOWN_EVENT, f"Unknown message type: {kind[:80]}")
        if self.phase is Phase.PAUSED and kind == CHUNK:
            return ClientError(ErrorCode.NOT_READY, "Worker is paused")
        if kind == PREPARE:
            return ClientError(ErrorCode.UNKNOWN_EVENT, "Already prepared")
        return ClientError(ErrorCode.NOT_READY, f"Not prepared: {kind}")

    def _read(self, kind: str, event: Fields) -> Action:
        match kind:
            case "audio_chunk":
                return self._read_chunk(event)
            case "prepare":
                return Configure(self._settings(event))
            case "stop":
                return Leave()
            case "pause":
                return self._pause(event)
            case "resume":
                return self._resume()
            case _:
                return self._interrupt(kind)

    def _pause(self, event: Fields) -> Answer:
        timeout_s = event.number("timeout", 0.0, self.limits.pause_s)
        self._pause_s = DEFAULT_PAUSE_S if timeout_s is None else timeout_s
        request = session_pb2.ConverseRequest()
        request.pause.timeout.FromNanoseconds(int(self._pause_s * 1e9))
        return Answer((_event("paused", timeout=self._pause_s),), request)

    def _resume(self) -> Answer:
        """Resume what is paused; what is not is answered alike, as clients expect."""
        request = session_pb2.ConverseRequest(resume=session_pb2.Resume())
        return Answer((_event("resumed"),), request if self.phase is Phase.PAUSED else None)

    def _interrupt(self, kind: str) -> Answer:
        """Let the next unit listen; a diagnostic is taken and forgotten."""
        if kind != INTERRUPT:
            return Answer()
        self._is_interrupted = True
        return Answer((_event("interrupted"),))

    def _settings(self, event: Fields) -> session_pb2.Open:
        prompt = event.text("system_prompt", max_bytes=self.limits.instructions_bytes)
        settings = session_pb2.Open(
            system_prompt=DEFAULT_PROMPT if prompt is None else prompt,
            llm_voice=read_voice(event, "ref_audio_base64", self.limits.voice_s),
            tts_voice=read_voice(event, "tts_ref_audio_base64", self.limits.voice_s),
        )
        config = event.fields("config")
        if config is not None:
            read_duplex_config(config, settings.config)
        if self.mode.takes_frames:
            configured = read_slice_count(config) if config else None
            self._max_slice_count = read_slice_count(event) or configured
        self._ignored = ignored(event, config)
        return settings

    def _read_chunk(self, event: Fields) -> Append:
        encoded = event.text("audio_base64")
        if not encoded:
            raise ClientError(ErrorCode.MISSING_FIELD, "Missing audio_base64")
        audio = decode_audio(encoded, "audio_base64", self.limits.append_s)
        frames: tuple[bytes, ...] = ()
        if self.mode.takes_frames:
            frames = read_frames(event, ("frame_base64_list",), self.limits)
        slices = (read_slice_count(event) or self._max_slice_count) if frames else None
        force_listen = event.flag("force_listen") or self._is_interrupted
        self._is_interrupted = False
        return Append(audio, force_listen, frames=frames, max_slice_count=slices)

    def _opened_events(self, opened: session_pb2.Opened, now: Moment) -> list[bytes]:
        del now
        told: dict[str, object] = {"prompt_length": opened.prompt_token_count}
        if self.identity.recording_id:
            told["recording_session_id"] = self.identity.recording_id
        if unheeded := [*self._ignored, *opened.ignored_fields]:
            told["ignored_init_fields"] = unheeded
        return [_event("prepared", **told)]

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped_count: int, now: Moment
    ) -> list[bytes]:
        """Render the answer to one chunk as one `result`."""
        del tag
        told = _UNCOUNTED | metrics(delta, dropped_count)
        is_speech = delta.WhichOneof("outcome") == "speech"
        self._result_count += 1
        event: dict[str, object] = {
            "type": "result",
            "is_listen": not is_speech,
            "text": delta.speech.text if is_speech else "",
            "end_of_turn": delta.end_of_turn,
            "current_time": self._result_count,
            "cost_llm_ms": told["cost_llm_ms"],
            "cost_tts_prep_ms": told["cost_tts_prep_ms"],
            "cost_tts_ms": told["cost_tts_ms"],
            "cost_token2wav_ms": told["cost_token2wav_ms"],
            "cost_all_ms": told["wall_clock_ms"],
            "n_tokens": told["n_tokens"],
            "n_tts_tokens": told["n_tts_tokens"],
            "server_send_ts": now.wall_s,
            "wall_clock_ms": told["wall_clock_ms"],
            "kv_cache_length": delta.context_token_count,
            "vision_slices": told["vision_slices"],
            "vision_tokens": told["vision_tokens"],
        }
        if dropped_count:
            event["dropped_units"] = dropped_count
        if is_speech and delta.speech.audio:
            return [with_audio(event, delta.speech.audio, "audio_data")]
        return [orjson.dumps({**event, "audio_data": None})]

    def _closed_events(self, ending: Ending, now: Moment) -> list[bytes]:
        match ending.end:
            case End.CLIENT:
                return [_event("stopped")]
            case End.TIMEOUT:
                is_pause = self.phase is Phase.PAUSED
                pause = f"Pause timeout ({self._pause_s}s)"
                reason = pause if is_pause else ending.message or "Session timeout"
                return [_event("timeout", reason=reason)]
            case End.CONTEXT_FULL:
                return [self.error(ErrorCode.INFERENCE_ERROR, "Context is full", now)]
            case End.SHUTDOWN:
                return [self.error(ErrorCode.SERVICE_UNAVAILABLE, "Server is shutting down", now)]
            case End.FAILED:
                message = ending.message or "the worker was lost"
                return [self.error(ErrorCode.INFERENCE_ERROR, message, now)]
            case _:
                return []

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render an `error` event; the dialect has no codes, and no names of inputs."""
        del code, now, input_id
        return _event("error", error=message)


def _event(kind: str, **fields: object) -> bytes:
    return orjson.dumps({"type": kind, **fields})
