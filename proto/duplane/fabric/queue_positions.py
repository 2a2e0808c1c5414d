"""Positions in the queue, as a client of schedulers passes them on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from duplane.fabric.v1 import lease_pb2

OnQueued = Callable[[lease_pb2.Queued], Awaitable[None]]


def never_growing(on_queued: OnQueued) -> OnQueued:
    """Return a callback that passes positions on to `on_queued`, but never a growing position.

    After a restart without its queue, a scheduler can count more tickets ahead of the caller than
    before the restart, because callers whose grants were lost return too.
    """
    lowest: int | None = None

    async def pass_on(queued: lease_pb2.Queued) -> None:
        nonlocal lowest
        queued.position = lowest = min(queued.position, lowest or queued.position)
        await on_queued(queued)

    return pass_on
