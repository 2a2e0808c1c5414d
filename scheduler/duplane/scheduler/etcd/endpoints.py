"""The members of an etcd cluster: a client's channels to them, and their health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 5.0
_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # etcd closes connections that ping more often than every 5 s (GOAWAY, too_many_pings). The
    # deadlines of calls and the probes of watches find a hung member sooner than these pings.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Without this option the channels of one process would share connections.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(eq=False)
class Endpoint:
    """One member. After a failure it is avoided until `retry_at` (monotonic seconds)."""

    address: str
    channel: grpc.aio.Channel
    failure_count: int = 0
    retry_at: float = 0.0


class Endpoints:
    """One channel to each member of a cluster. A channel connects at its first call.

    Calls go to the member that answered last. After a failure a member is avoided, unless all other
    members have failed too. The time for which it is avoided doubles with each failure, from 0.5 s
    to 5 s.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: grpc.ChannelCredentials | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._all = [Endpoint(address, _open(address, credentials)) for address in addresses]
        self._former: list[grpc.aio.Channel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._preferred = self._all[0]

    def __len__(self) -> int:
        return len(self._all)

    def pick(self, avoided: Endpoint | None = None) -> Endpoint:
        """Return the member to call: `avoided` only if the cluster has no other member."""
        now = self._clock()
        candidates = [one for one in self._all if one is not avoided] or self._all
        return min(
            candidates,
            key=lambda one: (max(0.0, one.retry_at - now), one is not self._preferred),
        )

    def find(self, address: str) -> Endpoint | None:
        """Return the member at an address, or None if no member has this address."""
        return next((one for one in self._all if one.address == address), None)

    def note_answer(self, endpoint: Endpoint) -> None:
        """Record that a member answered."""
        endpoint.failure_count = 0
        endpoint.retry_at = 0.0
        self._preferred = endpoint

    def note_failure(self, endpoint: Endpoint) -> None:
        """Record that a member did not answer in time, or cannot execute requests."""
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(endpoint.failure_count, 8), _MAX_PAUSE_S)
        endpoint.failure_count += 1
        endpoint.retry_at = self._clock() + pause_s

    def renew(self, credentials: grpc.ChannelCredentials | None) -> None:
        """Open new channels, with other credentials, for new calls.

        Running calls continue on the former channels, which close at the next renewal: a watch
        that has lasted so long continues at another member, and misses nothing.
        """
        for channel in self._former:
            closing = asyncio.create_task(channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._former = [endpoint.channel for endpoint in self._all]
        for endpoint in self._all:
            endpoint.channel = _open(endpoint.address, credentials)
            endpoint.failure_count, endpoint.retry_at = 0, 0.0

    async def close(self) -> None:
        """Close every channel."""
        for channel in (*self._former, *(endpoint.channel for endpoint in self._all)):
            await channel.close()
        await asyncio.gather(*self._closing)


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials:
        return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
