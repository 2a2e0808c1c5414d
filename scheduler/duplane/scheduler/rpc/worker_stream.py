"""The outgoing side of one worker's Attach stream."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

import grpc.aio

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.store.base import DrainRequest, Worker

WRITE_TIMEOUT_S = 30.0  # a worker that does not read a message for this long loses its stream
_LAST_WRITE_S = 1.0  # time to end a write when the stream ends
Context = grpc.aio.ServicerContext[registry_pb2.AttachRequest, registry_pb2.AttachResponse]


class WorkerStream:
    """The messages that wait for one worker, and the error that ends its stream.

    At most one revoke for each slot waits, and one message of each other kind. `drain` and
    `undrain` are one kind. A newer message replaces the waiting one, because it has everything
    that the worker still needs. It keeps the place of the waiting one, so that no message that is
    often replaced waits forever.

    `write_messages` and `raise_failure` run concurrently as long as the stream lasts.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker_id = worker.worker_id
        self.epoch = worker.epoch
        self.has_report = asyncio.Event()
        self.is_reading = False  # not while a report waits for the store
        self.sent_request = DrainRequest.NONE  # the last request of operators that was sent
        self.progress_due = 0.0  # time of the next `progress` message
        self._outbox: dict[tuple[str | None, int], registry_pb2.AttachResponse] = {}
        self._has_message = asyncio.Event()
        self._failure: FabricError | None = None
        self._has_failed = asyncio.Event()

    def send(self, message: registry_pb2.AttachResponse) -> None:
        """Queue a message."""
        kind = message.WhichOneof("message")
        key = ("drain" if kind == "undrain" else kind, message.revoke.slot)  # slot 0: no revoke
        waiting = self._outbox.get(key)
        if waiting is None or not _is_covered(message.revoke, waiting.revoke):
            self._outbox[key] = message
        self._has_message.set()

    def fail(self, reason: Reason, message: str) -> None:
        """End the stream; messages in the queue are dropped."""
        self._failure = self._failure or FabricError(reason, message)
        self._has_failed.set()

    async def write_messages(self, context: Context) -> NoReturn:
        """Write queued messages until cancelled. Raises FabricError if the stream has ended."""
        while True:
            while not self._outbox:
                self._has_message.clear()
                await self._has_message.wait()
            message = self._outbox.pop(next(iter(self._outbox)))
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await _write(context, message)
            except TimeoutError:
                why = "the worker does not read its messages"
                raise FabricError(Reason.UNAVAILABLE, why) from None
            except grpc.aio.BaseError:
                raise FabricError(Reason.UNAVAILABLE, "the worker's stream has ended") from None

    async def raise_failure(self) -> None:
        """Wait for a failure, then raise it."""
        await self._has_failed.wait()
        if self._failure:
            raise self._failure


async def _write(context: Context, message: registry_pb2.AttachResponse) -> None:
    """Write one message. If cancelled, end the write first, for at most `_LAST_WRITE_S`.

    gRPC cannot send the error that ends a call while a write is in progress.
    """
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        with contextlib.suppress(TimeoutError, grpc.aio.BaseError):
            async with asyncio.timeout(_LAST_WRITE_S):
                await writing
        raise


def _is_covered(revoke: registry_pb2.Revoke, waiting: registry_pb2.Revoke) -> bool:
    """True if `revoke` adds nothing to a revoke of the same slot that waits to be sent.

    A revoke makes its fencing number and all lower numbers void. It ends a session only if it names
    the session's lease. A revoke with a lower number than the waiting one ends no session: the slot
    was granted again since, and this happens only after the worker has seen the lower number.
    """
    if revoke.fencing_number == waiting.fencing_number:
        return bool(waiting.lease_id) and not revoke.lease_id
    return revoke.fencing_number < waiting.fencing_number
