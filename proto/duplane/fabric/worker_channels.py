"""The gRPC channels of one client to workers: shared by its sessions, bounded in number."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import grpc.aio

from duplane.fabric.channel import open_channel

MAX_COUNT = 256  # above it, the channel that was unused for longest is closed


class WorkerChannels:
    """Opens channels by address and keeps them for later calls."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}  # least recently used first
        self._user_counts: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> AsyncGenerator[grpc.aio.Channel]:
        """Yield the channel to a worker, which stays open during the body of the `with`."""
        channel = self._channels.pop(address, None) or open_channel(address)
        self._channels[address] = channel
        self._user_counts[address] = self._user_counts.get(address, 0) + 1
        try:
            yield channel
        finally:
            self._user_counts[address] -= 1
            await self._close_unused()

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()

    async def _close_unused(self) -> None:
        for address in list(self._channels)[: max(0, len(self._channels) - MAX_COUNT)]:
            if self._user_counts[address] == 0:
                del self._user_counts[address]
                await self._channels.pop(address).close()
