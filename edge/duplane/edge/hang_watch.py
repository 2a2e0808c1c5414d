"""Finds workers that hang: their connections stay open, so errors report a hang only late."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from duplane.edge.session.duplex_runner import DuplexRunner
from duplane.edge.session.slot import Slot
from duplane.fabric.client import FabricClient, worker_name
from duplane.fabric.v1 import lease_pb2

_log = logging.getLogger(__name__)


class HangWatch:
    """Finds the workers from which sessions have waited `overdue_s` for an answer.

    The awaited answer is the answer to the settings, to a unit or, during a move, to past units.
    While a unit has no answer, the session prepares a slot of another worker, and moves there
    unless the answer comes first.

    A worker that is only slow answers a call to its health service. A worker that does not answer
    this call within `overdue_s` is lost for all its sessions that wait. One check serves all
    sessions of a worker. A session that cannot move is not watched; it ends when the connection to
    its worker fails.
    """

    def __init__(
        self, runners: Callable[[], Iterable[DuplexRunner]], fabric: FabricClient, overdue_s: float
    ) -> None:
        self._runners = runners
        self._fabric = fabric
        self._overdue_s = overdue_s
        self._checked: set[str] = set()  # addresses of workers

    async def run(self) -> None:
        """Watch until cancelled. After an error the watch begins anew."""
        while True:
            try:
                await self._watch()
            except Exception:  # noqa: BLE001 - without the watch, sessions stay at hanging workers
                _log.exception("the watch of workers failed and begins anew")
            self._checked.clear()

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as checks:
            while True:
                begin_s = time.monotonic()
                await asyncio.sleep(self._overdue_s / 4)
                if time.monotonic() - begin_s > self._overdue_s:
                    continue  # this process had no time: answers may have come meanwhile
                for runner, slot in self._overdue():
                    runner.hedge(slot)
                    granted = slot.granted
                    if granted.worker_address not in self._checked:
                        self._checked.add(granted.worker_address)
                        checks.create_task(self._check(granted))

    def _overdue(self) -> list[tuple[DuplexRunner, Slot]]:
        return [
            (runner, slot)
            for runner in self._runners()
            for slot in runner.overdue_slots(self._overdue_s)
        ]

    async def _check(self, granted: lease_pb2.Granted) -> None:
        """Check the worker of a slot. End the calls to the worker if it does not answer."""
        address, begin_s = granted.worker_address, time.monotonic()
        is_alive = await self._fabric.is_alive(address, self._overdue_s)
        is_late = time.monotonic() - begin_s > 1.5 * self._overdue_s  # this process had no time
        if is_alive:
            await asyncio.sleep(self._overdue_s)
        self._checked.discard(address)
        if is_alive or is_late:
            return
        _log.warning("worker %s at %s hangs", worker_name(granted), address)
        self._fabric.report_unreachable(granted)  # although its sessions may have left it already
        for runner, slot in self._overdue():
            if slot.granted.worker_address == address:
                runner.lose(slot)
