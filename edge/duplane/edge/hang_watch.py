"""Finds workers that hang: their connections stay open, so no error reports the hang soon."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from duplane.edge.session.duplex_runner import DuplexRunner
from duplane.fabric.client import FabricClient

_log = logging.getLogger(__name__)


class HangWatch:
    """Checks the workers from which sessions have waited `overdue_s` for an answer.

    A session waits for the answer to a unit or, while it moves, to its settings and past units. A
    session that cannot move is not watched; it ends when the connection to its worker fails.

    The check is a call to the worker's health service. A worker that is only slow answers this
    call. If a worker does not answer within `overdue_s`, its sessions move to other workers. One
    check serves all sessions of a worker.
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
                await asyncio.sleep(self._overdue_s / 4)
                for address in {one.worker for one in self._runners() if self._is_overdue(one)}:
                    if address not in self._checked:
                        self._checked.add(address)
                        checks.create_task(self._check(address))

    def _is_overdue(self, runner: DuplexRunner) -> bool:
        return runner.waited_s > self._overdue_s

    async def _check(self, address: str) -> None:
        """Check one worker. End the calls to the worker if it does not answer."""
        begin_s = time.monotonic()
        is_alive = await self._fabric.is_alive(address, self._overdue_s)
        is_late = time.monotonic() - begin_s > 1.5 * self._overdue_s  # this process had no time
        if is_alive:
            await asyncio.sleep(self._overdue_s)
        self._checked.discard(address)
        if is_alive or is_late:
            return
        _log.warning("worker %s hangs", address)
        for runner in self._runners():
            if runner.worker == address and self._is_overdue(runner):
                runner.lose_worker()
