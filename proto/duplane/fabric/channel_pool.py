"""A bounded pool of gRPC channels. Calls to the same address share a channel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass

import grpc
import grpc.aio

from duplane.fabric.channel import open_channel

MAX_COUNT = 256  # with more channels, the least recently used one is closed once no call uses it


@dataclass(slots=True, eq=False)
class _Pooled:
    address: str
    channel: grpc.aio.Channel
    user_count: int = 0


class ChannelPool:
    """Opens channels by address and keeps them for later calls.

    A channel that could not connect is replaced at the next call: it would refuse calls until its
    next attempt, and another process may listen at its address meanwhile.
    """

    def __init__(self) -> None:
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
        if pooled and pooled.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            self._former.add(pooled)
            pooled = None
        pooled = self._pooled[address] = pooled or _Pooled(address, open_channel(address))
        pooled.user_count += 1
        try:
            yield pooled.channel
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

    async def _close_unused(self) -> None:
        surplus = list(self._pooled)[: max(0, len(self._pooled) - MAX_COUNT)]
        for address in surplus:
            if self._pooled[address].user_count == 0:
                self._former.add(self._pooled.pop(address))
        unused = {pooled for pooled in self._former if pooled.user_count == 0}
        self._former -= unused
        for pooled in unused:
            await pooled.channel.close()
