"""One Chat call that holds a slot: what it is told, and when it ends.

Knows the stream and the engine; nothing of leases or of other sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import Message
from opentelemetry.util.types import AttributeValue

from duplane.fabric import telemetry
from duplane.fabric.audio import pcm_from_samples
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.chat_options import chat_request, invalid_chat
from duplane.worker.chat_spans import ChatSpans
from duplane.worker.deltas import MODEL_STAGES, duration
from duplane.worker.engine import Engine
from duplane.worker.model.chat_types import ChatOutput, Finish
from duplane.worker.model.types import OptionError
from duplane.worker.preparation import AbandonedError
from duplane.worker.rounds import ChatStep, Event, Lost, PreparedChat
from duplane.worker.settings import SessionLimits
from duplane.worker.videos import Videos

_log = logging.getLogger(__name__)

_FINISHES = {
    Finish.STOP: session_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: session_pb2.FINISH_REASON_LENGTH,
    Finish.CONTEXT_FULL: session_pb2.FINISH_REASON_CONTEXT_FULL,
}
_ENDINGS = {
    session_pb2.CLOSE_REASON_SHUTDOWN: FabricError(Reason.DRAINING, "the worker is going away"),
    session_pb2.CLOSE_REASON_REVOKED: FabricError(Reason.LEASE_STALE, "the lease was revoked"),
}


class ChatSession:
    """A claimed chat, from its request to `done`."""

    def __init__(
        self,
        stream: grpc.aio.ServicerContext[Any, Any],
        slot: int,
        engine: Engine,
        limits: SessionLimits,
        videos: Videos,
        spans: ChatSpans,
    ) -> None:
        self._stream = stream
        self._videos = videos
        self._engine = engine
        self._limits = limits
        self._spans = spans
        self._counts = session_pb2.TokenCounts()
        self._untold_s: dict[str, float] = {}  # of steps since the last delta
        self._told_at_s = time.monotonic()
        self._sequence = 0
        self._end: asyncio.Future[FabricError | None] = asyncio.get_running_loop().create_future()
        self._events = asyncio.Queue[ChatStep | Lost]()  # the engine's credit bounds it
        self.conversation = engine.converse(slot, self._on_event)

    def end(self, closed: session_pb2.Closed) -> None:
        """End the chat because the worker wants its slot back."""
        unknown = FabricError(Reason.UNAVAILABLE, "the chat was ended")
        self._finish(_ENDINGS.get(closed.reason, unknown))

    def _finish(self, failure: FabricError | None) -> None:
        """The first reason given counts."""
        if not self._end.done():
            self._end.set_result(failure)

    async def run(self, request: session_pb2.ChatRequest, release: Callable[[], None]) -> None:
        """Serve the call to its end. Raises FabricError when it must end with a failure.

        `release` is called once, as soon as the end is known: the slot waits for no client.
        """
        async with asyncio.TaskGroup() as tasks:
            server = tasks.create_task(self._serve(request))
            failure = await self._end
            self._engine.silence(self.conversation)
            release()
            server.cancel()
        self._spans.close(None if failure is None else failure.reason)
        if failure is not None:
            raise failure

    async def _serve(self, request: session_pb2.ChatRequest) -> None:
        try:
            self._spans.begin(telemetry.WORKER_CHAT_PREPARE)
            prepared = await self._prepare(request)
            self._spans.end({telemetry.PROMPT_TOKEN_COUNT: prepared.prompt_rows})
            self._count_prompt(prepared)
            self._spans.begin(telemetry.WORKER_CHAT_PREFILL)
            credit = self._limits.outbox_message_count
            self._engine.open_chat(self.conversation, prepared, credit)
            await self._answer(prepared)
            self._finish(None)
        except FabricError as error:
            self._finish(error)
        except TimeoutError:
            message = "the client does not read what it is sent"
            self._finish(FabricError(Reason.SLOW_CLIENT, message))
        except grpc.aio.BaseError as error:
            _log.debug("the client is gone: %s", error)
            self._finish(None)
        except AbandonedError:
            pass  # the end is known already

    async def _prepare(self, request: session_pb2.ChatRequest) -> PreparedChat:
        """Check the request and lay out its prompt, beside what the device runs."""
        try:
            wanted = chat_request(request, self._limits)
            cut = partial(self._engine.prepare_picture, self.conversation)
            wanted = await self._videos.fill(wanted, request, cut)
            return await self._engine.prepare_chat(self.conversation, wanted)
        except OptionError as error:
            raise invalid_chat(error) from None

    def _on_event(self, event: Event) -> None:
        if isinstance(event, ChatStep | Lost):
            self._events.put_nowait(event)

    async def _answer(self, prepared: PreparedChat) -> None:
        """Write what the engine tells, up to and with `done`."""
        is_told = False
        while True:
            event = await self._events.get()
            if isinstance(event, Lost):
                raise FabricError(Reason.ENGINE_FAILED, "the model failed; its log says why")
            output = event.output
            self._count(output)
            if output.is_prefilled and not is_told:
                is_told = True
                self._spans.end(_described(event))
                self._spans.begin(telemetry.WORKER_CHAT_PIECE)
                count = prepared.prompt_rows
                await self._write(prefilled=session_pb2.Prefilled(prompt_token_count=count))
            if output.text or output.audio.size or output.token_ids:
                delta = self._delta(output)
                self._spans.end({**_described(event), telemetry.CHAT_SEQUENCE: delta.sequence})
                await self._write(delta=delta)
                self._spans.begin(telemetry.WORKER_CHAT_PIECE)
            if output.finish is not None:
                self._spans.note(telemetry.CHAT_FINISH, output.finish.name)
                reason = _FINISHES[output.finish]
                await self._write(done=session_pb2.Done(reason=reason, token_counts=self._counts))
                return
            self._engine.restore(self.conversation)

    async def _write(self, **event: Message) -> None:
        response = session_pb2.ChatResponse(**event)  # pyright: ignore[reportArgumentType]
        async with asyncio.timeout(self._limits.stall_timeout_s):
            await self._stream.write(response)

    def _delta(self, output: ChatOutput) -> session_pb2.ChatDelta:
        now_s = time.monotonic()
        stages_s = {**self._untold_s, "total": now_s - self._told_at_s}
        self._untold_s, self._told_at_s = {}, now_s
        delta = session_pb2.ChatDelta(
            sequence=self._sequence,
            text=output.text,
            audio=pcm_from_samples(output.audio),
            token_ids=output.token_ids,
            stage_times=session_pb2.StageTimes(
                **{
                    stage: duration(stages_s[stage])
                    for stage in (*MODEL_STAGES, "total")
                    if stages_s.get(stage)
                }
            ),
            context_token_count=output.context_length,
        )
        self._sequence += 1
        return delta

    def _count_prompt(self, prepared: PreparedChat) -> None:
        media_rows = prepared.image_rows + prepared.audio_rows
        self._counts.input_video_token_count = prepared.image_rows
        self._counts.input_audio_token_count = prepared.audio_rows
        self._counts.input_text_token_count = prepared.prompt_rows - media_rows

    def _count(self, output: ChatOutput) -> None:
        self._counts.output_text_token_count += len(output.token_ids)
        self._counts.output_audio_token_count += output.audio_token_count
        self._spans.took(output.stage_s)
        self._spans.note(telemetry.CONTEXT_TOKEN_COUNT, output.context_length)
        for stage, seconds in output.stage_s.items():
            self._untold_s[stage] = self._untold_s.get(stage, 0.0) + seconds


def _described(step: ChatStep) -> dict[str, AttributeValue]:
    return {
        telemetry.BATCH_SIZE: step.batch_size,
        telemetry.CONTEXT_TOKEN_COUNT: step.output.context_length,
    }
