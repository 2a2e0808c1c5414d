"""One Chat call: one turn of chat, from its request to `done`."""

from __future__ import annotations

from functools import partial

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.engine.engine import AnyEngine
from duplane.worker.engine.events import ChatStep, Event, Lost
from duplane.worker.models.interface import PreparedChat
from duplane.worker.models.types import OptionError
from duplane.worker.session.call import MODEL_FAILED, Call, CallEnd, Connection, Stream
from duplane.worker.session.chat_options import chat_request, ignored_paths, invalid_chat
from duplane.worker.session.chat_reporter import ChatReporter
from duplane.worker.settings import SessionLimits
from duplane.worker.video.decoding import Videos

_CLOSE_ERRORS = {
    session_pb2.CLOSE_REASON_SHUTDOWN: FabricError(Reason.DRAINING, "the worker shuts down"),
    session_pb2.CLOSE_REASON_ENGINE_FAILED: FabricError(Reason.ENGINE_FAILED, MODEL_FAILED),
    session_pb2.CLOSE_REASON_REVOKED: FabricError(Reason.LEASE_STALE, "the lease was revoked"),
    session_pb2.CLOSE_REASON_OPERATOR: FabricError(
        Reason.TICKET_CANCELLED, "an operator ended the session"
    ),
}


class ChatCall(Call[session_pb2.ChatResponse]):
    """The call of one turn of chat, after its claim."""

    def __init__(
        self,
        stream: Stream,
        slot: int,
        request: session_pb2.ChatRequest,
        engine: AnyEngine,
        reporter: ChatReporter,
        limits: SessionLimits,
        videos: Videos,
    ) -> None:
        # Credit bounds the deltas in the outbox. `prefilled` and `done` need two more places.
        super().__init__(stream, slot, engine, limits, limits.outbox_message_count + 2)
        self._request = request
        self._reporter = reporter
        self._videos = videos

    def close(self, reason: session_pb2.CloseReason) -> None:
        """End the turn with an error, because a Chat stream has no message `closed`."""
        ended = FabricError(Reason.UNAVAILABLE, "the worker ended the chat")
        self.end(_CLOSE_ERRORS.get(reason, ended))

    def _last_response(self, end: CallEnd) -> None:
        self._reporter.finish(end.reason if isinstance(end, FabricError) else None)

    async def _receive(self, connection: Connection[session_pb2.ChatResponse]) -> None:
        with self._ending_on_errors(connection):
            self._reporter.begin_preparation()
            prepared = await self._prepare()
            self._reporter.begin_prefill(prepared, ignored_paths(self._request, prepared))
            self._engine.open_chat(self.channel, prepared, self._limits.outbox_message_count)

    async def _prepare(self) -> PreparedChat:
        """Check the request, decode its videos and lay out its prompt, without the device."""
        try:
            chat = chat_request(self._request, self._limits, self._engine.constants.input_hertz)
            prepare_picture = partial(self._engine.prepare_picture, self.channel)
            chat = await self._videos.fill(chat, self._request, prepare_picture)
            return await self._engine.prepare_chat(self.channel, chat)
        except OptionError as error:
            raise invalid_chat(error) from None

    def _on_event(self, event: Event) -> None:
        if self._end.done():
            return
        if isinstance(event, Lost):
            self.end(FabricError(Reason.ENGINE_FAILED, MODEL_FAILED))
        elif isinstance(event, ChatStep):
            self._on_step(event)

    def _on_step(self, step: ChatStep) -> None:
        """Send the responses of a step. One more step may run when the last response is written."""
        responses = self._reporter.responses(step)
        for response in responses[:-1]:
            self._send(response)
        if not responses:
            self._engine.return_credit(self.channel)
        elif step.output.finish is not None:
            self._send(responses[-1], self._on_done_written)
        else:
            self._send(responses[-1], partial(self._engine.return_credit, self.channel))

    def _on_done_written(self) -> None:
        self.end(session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CLIENT))
