"""Reads first messages of calls, which may be large, without much memory for unknown clients."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from duplane.fabric import lease_metadata
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.tls.peers import peer_holder
from duplane.fabric.v1 import lease_pb2
from duplane.worker.admission import Admission

# First messages of calls without a lease in their metadata that are read at the same time. A
# message has at most 32 MiB. Further calls wait, at most `_WAIT_S`; then they are refused.
MAX_UNCHECKED_COUNT = 8
_WAIT_S = 10.0


class FirstMessages:
    """Checks the lease in the metadata of a call before the first message is read.

    A lease lets one call at a time read its first message. Clients of older releases send their
    lease only in the message. Few such messages are read at the same time.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._unchecked = asyncio.Semaphore(MAX_UNCHECKED_COUNT)
        self._reading: set[str] = set()  # lease ids

    @contextlib.asynccontextmanager
    async def reading(
        self, context: grpc.aio.ServicerContext[Any, Any], *, is_chat: bool = False
    ) -> AsyncGenerator[lease_pb2.Lease | None]:
        """Read the first message of a call in the body of the `with`.

        Yields the lease in the metadata, if there is one. Raises FabricError if it is void.
        """
        lease = lease_metadata.lease_of(context.invocation_metadata() or ())
        if lease is None:
            async with self._place():
                yield None
            return
        claims = self._admission.check(
            lease, time.monotonic(), is_chat=is_chat, caller=peer_holder(context)
        )
        if claims.lease_id in self._reading:
            raise FabricError(Reason.LEASE_STALE, "another call uses the lease")
        self._reading.add(claims.lease_id)
        try:
            yield lease
        finally:
            self._reading.discard(claims.lease_id)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._unchecked.acquire()
        except TimeoutError:
            message = f"too many calls have no lease in the metadata {lease_metadata.KEY}"
            raise FabricError(Reason.UNAVAILABLE, message) from None
        try:
            yield
        finally:
            self._unchecked.release()


def require_same(checked: lease_pb2.Lease | None, claimed: lease_pb2.Lease, field: str) -> None:
    """Refuse a message whose lease is not the one that was checked before the message was read."""
    if checked is not None and checked != claimed:
        message = f"{field} differs from the lease in the metadata"
        raise FabricError(Reason.INVALID_FIELD, message, field=field)
