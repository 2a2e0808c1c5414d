"""The loop that publishes changed queue positions, a bounded number at a time."""

from __future__ import annotations

import asyncio

from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Change, TicketGone

PORTION = 32  # maximum number of entries of one queue that are published without a pause
_PAUSE_S = 0.05  # between two portions; each entry of a portion is a message to its caller


class PositionUpdates:
    """Publishes changed positions in portions, from the front of the queue to its back.

    The first portion after a quiet time is published immediately. The rate is bounded, because one
    grant changes the positions of all tickets behind the granted ticket.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._has_moved = asyncio.Event()
        state.listeners.append(self._on_change)

    async def run(self) -> None:
        """Publish positions until cancelled."""
        while True:
            self._has_moved.clear()
            has_more = self._state.publish_positions(PORTION)
            await asyncio.sleep(_PAUSE_S)
            if not has_more:
                await self._has_moved.wait()

    def _on_change(self, change: Change) -> None:
        if isinstance(change, TicketGone):
            self._has_moved.set()
