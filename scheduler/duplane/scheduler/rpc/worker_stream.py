"""The outgoing side of one worker's Attach stream."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc.aio

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.store.base import Worker

OUTBOX_LENGTH = 256  # most unread messages of a worker; one more ends its stream
Context = grpc.aio.ServicerContext[registry_pb2.AttachRequest, registry_pb2.AttachResponse]


class WorkerStream:
    """The messages that wait for one worker, and the error that ends its stream.

    `write_messages` and `raise_failure` run concurrently as long as the stream lasts.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker_id = worker.worker_id
        self.epoch = worker.epoch
        self.has_report = asyncio.Event()
        self.is_drain_sent = False
        self.progress_due = 0.0  # time of the next `progress` message
        self._outbox = asyncio.Queue[registry_pb2.AttachResponse](OUTBOX_LENGTH)
        self._failure: FabricError | None = None
        self._has_failed = asyncio.Event()

    def send(self, message: registry_pb2.AttachResponse) -> None:
        """Queue a message. If the queue is full, the worker does not read, and the stream ends."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.fail(Reason.UNAVAILABLE, "the worker does not read its messages")

    def fail(self, reason: Reason, message: str) -> None:
        """End the stream; messages in the queue are dropped."""
        self._failure = self._failure or FabricError(reason, message)
        self._has_failed.set()

    async def write_messages(self, context: Context) -> NoReturn:
        """Write queued messages until cancelled. Raises FabricError if the stream has ended."""
        while True:
            message = await self._outbox.get()
            try:
                await context.write(message)
            except grpc.aio.BaseError:
                raise FabricError(Reason.UNAVAILABLE, "the worker's stream has ended") from None

    async def raise_failure(self) -> None:
        """Wait for a failure, then raise it."""
        await self._has_failed.wait()
        if self._failure:
            raise self._failure
