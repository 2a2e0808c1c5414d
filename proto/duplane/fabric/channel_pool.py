"""A bounded pool of gRPC channels. Calls to the same address share a channel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection

import grpc.aio

from duplane.fabric.channel import open_channel

MAX_COUNT = 256  # with more channels, the least recently used one is closed once no call uses it


class ChannelPool:
    """Opens channels by address and keeps them for later calls."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}  # least recently used first
        self._user_counts: dict[str, int] = {}
        self._former: set[str] = set()  # addresses whose channels close after their last use

    @property
    def addresses(self) -> Collection[str]:
        """The addresses to which a channel is open."""
        return self._channels.keys()

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> AsyncGenerator[grpc.aio.Channel]:
        """Yield the channel to a peer, which stays open during the body of the `with`."""
        channel = self._channels.pop(address, None) or open_channel(address)
        self._channels[address] = channel
        self._user_counts[address] = self._user_counts.get(address, 0) + 1
        try:
            yield channel
        finally:
            self._user_counts[address] -= 1
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
        self._former = self._channels.keys() - set(addresses)
        await self._close_unused()

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()

    async def _close_unused(self) -> None:
        surplus = list(self._channels)[: max(0, len(self._channels) - MAX_COUNT)]
        for address in {*surplus, *(self._former & self._channels.keys())}:
            if self._user_counts[address] == 0:
                del self._user_counts[address]
                await self._channels.pop(address).close()
