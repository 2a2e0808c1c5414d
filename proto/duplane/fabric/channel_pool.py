"""A bounded pool of gRPC channels. Calls to the same address share a channel."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from duplane.fabric.channel import open_channel
from duplane.fabric.errors import FabricError
from duplane.fabric.tls.failures import TlsFailures
from duplane.fabric.tls.identity import Role

if TYPE_CHECKING:
    # Not imported without TLS: it imports cryptography, which takes a tenth of a second.
    from duplane.fabric.tls.credentials import FabricCredentials

MAX_COUNT = 256  # with more channels, the least recently used one is closed once no call uses it
_NEW_S = 2.0  # a channel that fails so soon after it was opened may have been refused


@dataclass(slots=True, eq=False)
class _Pooled:
    address: str
    channel: grpc.aio.Channel
    version: int  # of the credentials
    opened_at: float  # monotonic seconds
    has_answered: bool = False
    user_count: int = 0


class ChannelPool:
    """Opens channels by address and keeps them for later calls.

    A channel that could not connect is replaced at the next call: it would refuse calls until its
    next attempt, and another process may listen at its address meanwhile. A channel is also
    replaced when the certificate of this process has changed. Calls that run on a replaced channel
    continue on it.

    With `credentials`, the channels use mutual TLS, and the peers must have certificates of `role`.
    """

    def __init__(
        self, role: Role = Role.SCHEDULER, credentials: FabricCredentials | None = None
    ) -> None:
        self._role = role
        self._credentials = credentials
        self._failures = TlsFailures(has_tls=credentials is not None)
        self._pooled: dict[str, _Pooled] = {}  # by address, least recently used first
        self._former: set[_Pooled] = set()  # these close after their last use

    @property
    def addresses(self) -> Collection[str]:
        """The addresses to which a channel is open."""
        return {pooled.address for pooled in (*self._pooled.values(), *self._former)}

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> AsyncGenerator[grpc.aio.Channel]:
        """Yield the channel to a peer, which stays open during the body of the `with`."""
        pooled = self._pooled.pop(address, None)
        if pooled and not self._is_usable(pooled):
            self._former.add(pooled)
            pooled = None
        pooled = self._pooled[address] = pooled or self._open(address)
        pooled.user_count += 1
        try:
            yield pooled.channel
            pooled.has_answered = True
        except (grpc.aio.AioRpcError, FabricError) as error:
            is_new = not pooled.has_answered and time.monotonic() - pooled.opened_at < _NEW_S
            self._failures.note(f"{self._role} {address}", error, is_new=is_new)
            raise
        finally:
            pooled.user_count -= 1
            await self._close_unused()

    async def until_any_ready(self, addresses: Collection[str], timeout_s: float) -> None:
        """Connect to all `addresses`. Wait for the first connection, but at most `timeout_s`."""
        async with contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(self.use(one)) for one in addresses]
            ready = [asyncio.ensure_future(channel.channel_ready()) for channel in channels]
            try:
                await asyncio.wait(ready, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in ready:
                    one.cancel()
                await asyncio.gather(*ready, return_exceptions=True)

    async def close_others(self, addresses: Collection[str]) -> None:
        """Close the channels to all other addresses. Running calls keep their channel open."""
        for address in self._pooled.keys() - set(addresses):
            self._former.add(self._pooled.pop(address))
        await self._close_unused()

    async def close(self) -> None:
        """Close all channels."""
        for pooled in (*self._pooled.values(), *self._former):
            await pooled.channel.close()

    def _is_usable(self, pooled: _Pooled) -> bool:
        has_failed = pooled.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return not has_failed and pooled.version == self._version

    def _open(self, address: str) -> _Pooled:
        channel = open_channel(address, self._role, self._credentials)
        return _Pooled(address, channel, self._version, time.monotonic())

    @property
    def _version(self) -> int:
        return self._credentials.version if self._credentials else 0

    async def _close_unused(self) -> None:
        surplus = list(self._pooled)[: max(0, len(self._pooled) - MAX_COUNT)]
        for address in surplus:
            if self._pooled[address].user_count == 0:
                self._former.add(self._pooled.pop(address))
        unused = {pooled for pooled in self._former if pooled.user_count == 0}
        self._former -= unused
        for pooled in unused:
            await pooled.channel.close()
