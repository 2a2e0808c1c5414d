"""Dialect O: OpenAI's chat completions, one HTTP request with a whole or a streamed answer."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from typing import ClassVar

import orjson
import pybase64

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.actions import Turn
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.dialect import (
    Decoders,
    Lifecycle,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
)
from duplane.edge.dialects.o_request import WAV, CompletionTurn, read_completion
from duplane.edge.dialects.openai_errors import (
    CLIENT_ERROR,
    SERVER_ERROR,
    SERVER_SHUTDOWN,
    error_fields,
    error_object,
)
from duplane.edge.payload.sound_format import OUTPUT_SOUND, Encoding, SoundFormat
from duplane.fabric.v1 import lease_pb2, session_pb2

REQUEST = "request"  # it has no type of its own
_WHOLE, _CHUNK = "chat.completion", "chat.completion.chunk"
_LENGTHS = (session_pb2.FINISH_REASON_LENGTH, session_pb2.FINISH_REASON_CONTEXT_FULL)
# Why a stream ends without its last chunk -> type and code of its error.
_ENDS: Mapping[CloseReason, tuple[str, str]] = {
    CloseReason.SHUTDOWN: SERVER_SHUTDOWN,
    CloseReason.CREDENTIAL_ENDED: (CLIENT_ERROR, "invalid_api_key"),
}
_NO_TURN = CompletionTurn(session_pb2.ChatRequest())


class DialectO(ChatDialect):
    """One HTTP request for a completion.

    The only event of an answer that is not streamed is the answer. The events of a stream are its
    chunks. A refusal is an HTTP status, unless the stream has begun.
    """

    name: ClassVar[str] = "O"
    is_one_shot: ClassVar[bool] = True
    begins_with_slot: ClassVar[bool] = False
    only_event: ClassVar[str] = REQUEST
    media_fields: ClassVar[Mapping[str, str]] = {
        "image": "image_url.url",
        "audio": "input_audio.data",
    }
    transitions: ClassVar[Transitions] = {(Phase.START, REQUEST): Phase.ACTIVE}
    replies: ClassVar[Replies] = {REQUEST: (_WHOLE, _CHUNK)}
    server_events: ClassVar[ServerEvents] = {
        _WHOLE: frozenset({Phase.ACTIVE}),
        _CHUNK: frozenset({Phase.ACTIVE}),
        "error": frozenset({Phase.ACTIVE}),
    }

    output_sound = SoundFormat(Encoding.INT16, OUTPUT_SOUND.rate_hertz)

    _completion = _NO_TURN
    _created_s = 0
    _has_begun = False  # the client has a chunk

    def _event_decoders(self) -> Decoders:
        return {REQUEST: lambda event: read_completion(event, self.limits, REQUEST)}

    @property
    def queue_s(self) -> float:
        """How long a client waits in the queue, at most: it cannot be told its position."""
        return self.limits.openai_queue_s

    @property
    def is_streaming(self) -> bool:
        """Whether the answer is a stream. False before the request is accepted."""
        return self._completion.is_streaming

    def queued(self, queued: lease_pb2.Queued, *, is_update: bool) -> list[bytes]:
        """Render nothing: an HTTP client gets no queue events."""
        del queued, is_update
        return []

    def queue_done(self) -> list[bytes]:
        """Render nothing: an HTTP client gets no queue events."""
        return []

    def begin(self, turn: Turn, now: Moment) -> None:
        """Begin to answer the turn, or begin again on another slot."""
        super().begin(turn, now)
        if isinstance(turn, CompletionTurn):
            self._completion = turn
        self._created_s = int(now.wall_s)

    # --- a stream ---

    def _delta_events(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        del now
        events = self._first()
        if not self._completion.audio_format:
            return [*events, self._chunk({"content": delta.text})] if delta.text else events
        if delta.text:
            events.append(self._chunk({"audio": {"id": self._audio_id, "transcript": delta.text}}))
        if delta.audio:
            sound = pybase64.b64encode_as_string(self.output_sound.encode(delta.audio))
            events.append(self._chunk({"audio": {"id": self._audio_id, "data": sound}}))
        return events

    def _first(self) -> list[bytes]:
        """Return the chunk before all others, which names the role; nothing if the client has it"""
        if self._has_begun:
            return []
        self._has_begun = True
        content = {} if self._completion.audio_format else {"content": ""}
        return [self._chunk({"role": "assistant", **content, "refusal": None})]

    def _chunk(self, delta: Mapping[str, object], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return self._object(_CHUNK, [choice], None)

    def _object(self, kind: str, choices: list[object], usage: object) -> bytes:
        event: dict[str, object] = {
            "id": f"chatcmpl-{self._id}",
            "object": kind,
            "created": self._created_s,
            "model": self._model_fields.get("model", self._completion.model),
            "choices": choices,
        }
        if kind == _WHOLE or self._completion.includes_usage:
            event["usage"] = usage
        if self.identity.recording_id:
            event["recording_session_id"] = self.identity.recording_id
        return orjson.dumps({**event, **self.identity.recording_field})

    @property
    def _id(self) -> str:
        return self.identity.session_id.removeprefix("sess_")

    @property
    def _audio_id(self) -> str:
        return f"audio_{self._id}"

    # --- the end of an answer ---

    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render the whole answer, or the last chunks of a stream."""
        del now
        reason = "length" if done.reason in _LENGTHS else "stop"
        usage = self._usage(done.token_counts)
        if not self.is_streaming:
            message = {"role": "assistant", "refusal": None, **self._content()}
            choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
            return [self._object(_WHOLE, [choice], usage)]
        events = self._first()
        if self._completion.audio_format:
            ended = {"id": self._audio_id, "expires_at": self._created_s}
            events.append(self._chunk({"audio": ended}))
        events.append(self._chunk({}, reason))
        if self._completion.includes_usage:
            events.append(self._object(_CHUNK, [], usage))
        return events

    def _content(self) -> dict[str, object]:
        """Return the content of an answer that is not streamed.

        The edge keeps no answer, so the speech has expired for requests that follow.
        """
        text = "".join(self._text)
        if not self._completion.audio_format:
            return {"content": text}
        sound = self.output_sound.encode(b"".join(self._audio))
        if self._completion.audio_format == WAV:
            sound = _wav_file(sound, self.output_sound)
        audio = {
            "id": self._audio_id,
            "data": pybase64.b64encode_as_string(sound),
            "expires_at": self._created_s,
            "transcript": text,
        }
        return {"content": None, "audio": audio}

    def _usage(self, counts: session_pb2.TokenCounts) -> dict[str, object]:
        text_count, audio_count = counts.output_text_token_count, counts.output_audio_token_count
        answer_count, prompt_count = text_count + audio_count, self._prompt_token_count
        return {
            "prompt_tokens": prompt_count,
            "completion_tokens": answer_count,
            "total_tokens": prompt_count + answer_count,
            "prompt_tokens_details": {
                "cached_tokens": 0,
                "audio_tokens": counts.input_audio_token_count,
            },
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": audio_count,
            },
        }

    # --- errors ---

    def ended(self, close: Close, now: Moment) -> list[bytes]:
        """Render the fault that ends a stream. Before its first chunk, the HTTP status says it."""
        del now
        self._advance(Lifecycle.CLOSED)
        if not self._has_begun or close.reason is CloseReason.ANSWERED:
            return []
        kind, code = _ENDS.get(close.reason, SERVER_ERROR)
        return [orjson.dumps({"error": error_object(close.text, kind, code)})]

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        """Render the body of the answer to a refused request."""
        del now, input_id
        return orjson.dumps({"error": refusal(code, message)})


def _wav_file(sound: bytes, form: SoundFormat) -> bytes:
    """Return a WAV file with mono sound in int16."""
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(form.sample_bytes)
        wav.setframerate(form.rate_hertz)
        wav.writeframes(sound)
    return file.getvalue()


def refusal(code: ErrorCode, message: str) -> dict[str, object]:
    """Return the `error` of a refused request."""
    fields = error_fields(code, message)
    name = "unsupported_parameter" if code is ErrorCode.UNSUPPORTED else fields["code"]
    return {"message": message, "type": fields["type"], "param": fields.get("param"), "code": name}
