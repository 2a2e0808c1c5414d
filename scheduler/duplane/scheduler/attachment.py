"""One worker's stream, as those see it that have something to tell the worker."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc.aio

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.store.base import Worker

OUTBOX_LENGTH = 256  # messages a worker may leave unread; one more ends its stream
Context = grpc.aio.ServicerContext[registry_pb2.AttachRequest, registry_pb2.AttachResponse]


class Attachment:
    """What waits to be told to a worker, and whether it was heard.

    `send` and `fail` run beside each other for as long as the stream lasts.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker_id = worker.worker_id
        self.epoch = worker.epoch
        self.heard = asyncio.Event()
        self.is_told_to_drain = False
        self._outbox = asyncio.Queue[registry_pb2.AttachResponse](OUTBOX_LENGTH)
        self._failure: FabricError | None = None
        self._has_failed = asyncio.Event()

    def tell(self, message: registry_pb2.AttachResponse) -> None:
        """Queue a message for the worker; one that has stopped reading loses its stream."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.end(Reason.UNAVAILABLE, "the worker does not read what it is told")

    def end(self, reason: Reason, message: str) -> None:
        """End the stream, whatever waits to be told."""
        self._failure = self._failure or FabricError(reason, message)
        self._has_failed.set()

    async def send(self, context: Context) -> NoReturn:
        """Write what is told, until cancelled."""
        while True:
            await context.write(await self._outbox.get())

    async def fail(self) -> None:
        """Raise the FabricError that the stream is to end with, once there is one."""
        await self._has_failed.wait()
        if self._failure:
            raise self._failure
