"""Keeps a lease of etcd alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from duplane.scheduler.etcd.client import (
    CALL_TIMEOUT_S,
    EtcdClient,
    EtcdError,
    NoAnswerError,
    is_token_refused,
)
from duplane.scheduler.etcd.endpoints import Endpoint
from duplane.scheduler.etcd.v3 import etcd_pb2

_PATH = "/etcdserverpb.Lease/LeaseKeepAlive"
_PAUSE_S = 0.1  # between a failure and the call to the next member
_RENEWALS_PER_TTL = 3

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews one lease over connections of its own, until the lease has ended.

    Each renewal opens a new stream with a deadline: a lasting stream could die unnoticed, and then
    the lease would run out. A member that was frozen may wrongly report that the lease has ended,
    because this member has not heard from the new leader yet. So the keeper checks such a report
    with another member.
    """

    def __init__(
        self,
        client: EtcdClient,
        lease: int,
        ttl_s: int,
        on_renewed: Callable[[float], None] | None = None,
    ) -> None:
        """Call `on_renewed` after each renewal, with the time at which the request was sent."""
        self.lease = lease
        self._on_renewed = on_renewed
        self._client = client
        self._ttl_s = ttl_s
        self._endpoints = client.open_endpoints()

    async def run(self) -> None:
        """Renew the lease until it has ended or the task is cancelled."""
        failed: Endpoint | None = None
        while True:
            endpoint = self._endpoints.pick(failed)
            sent_at = asyncio.get_running_loop().time()
            ttl_s = await self._renew(endpoint)
            if ttl_s is None:
                self._endpoints.note_failure(endpoint)
                failed = endpoint
                await asyncio.sleep(_PAUSE_S)
            elif ttl_s > 0:
                if self._on_renewed:
                    self._on_renewed(sent_at)
                self._endpoints.note_answer(endpoint)
                failed = None
                await asyncio.sleep(self._ttl_s / _RENEWALS_PER_TTL)
            elif await self._is_gone(endpoint):
                _log.error("lease %x of this scheduler has ended in etcd", self.lease)
                return
            else:
                _log.warning("%s reported a live lease as ended", endpoint.address)
                self._endpoints.note_failure(endpoint)
                failed = endpoint

    async def close(self) -> None:
        """Close the connections. The lease then lasts until its time runs out."""
        await self._client.close_endpoints(self._endpoints)

    async def _renew(self, endpoint: Endpoint) -> int | None:
        """Renew the lease once. Return the seconds it has left, or None if the member fails."""
        try:
            metadata = await self._client.metadata()
            call: Any = endpoint.channel.stream_stream(
                _PATH,
                request_serializer=etcd_pb2.LeaseKeepAliveRequest.SerializeToString,
                response_deserializer=etcd_pb2.LeaseKeepAliveResponse.FromString,
            )(timeout=CALL_TIMEOUT_S, metadata=metadata)
        except (EtcdError, NoAnswerError):
            return None
        try:
            await call.write(etcd_pb2.LeaseKeepAliveRequest(ID=self.lease))
            answer = await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            if is_token_refused(str(error)):
                self._client.forget_token()
            return None
        finally:
            call.cancel()
        return answer.TTL if isinstance(answer, etcd_pb2.LeaseKeepAliveResponse) else None

    async def _is_gone(self, endpoint: Endpoint) -> bool:
        """True if another member confirms that the lease has ended."""
        try:
            return await self._client.lease_ttl_s(self.lease, endpoint.address) <= 0
        except (EtcdError, NoAnswerError):
            return False
