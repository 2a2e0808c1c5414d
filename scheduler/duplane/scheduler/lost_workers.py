"""The workers that were lost: their registrations ended, but they had not announced their end.

Lost workers are kept for some minutes, so that operators can see which workers are missing, and
which sessions these had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.store.base import Worker

_log = logging.getLogger(__name__)

KEPT_S = 600.0  # a lost worker is kept for this time
# A worker is reported to the log after this time. A worker whose scheduler has ended attaches to
# another one earlier.
REPORT_AFTER_S = 2.0
_INTERVAL_S = 1.0  # between two checks of these times
MAX_COUNT = 1000  # of lost workers; the oldest are forgotten first
_NAMED_COUNT = 10  # sessions that the log names


@dataclass(frozen=True, slots=True)
class LostWorker:
    """One lost worker."""

    worker: Worker  # as last known
    attached_s: float  # how long it was registered
    lost_at: float  # time at which its registration ended

    @property
    def reason(self) -> str:
        """Why the worker counts as lost, for operators."""
        if self.worker.is_silent:
            return "it sent no more reports, and its connection was closed"
        if self.worker.is_unreachable:
            return "edges could not connect to it, and its connection to the scheduler broke"
        return "its connection to the scheduler broke, and it has not attached again"


class LostWorkers:
    """The lost workers, by worker id. Each of `listeners` is called with an id that is removed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.listeners: list[Callable[[str], None]] = []
        self._clock = clock
        self._lost: dict[str, LostWorker] = {}  # oldest first
        self._unreported: dict[str, None] = {}  # ids of workers that the log does not have yet

    def __len__(self) -> int:
        return len(self._lost)

    @property
    def ids(self) -> Iterable[str]:
        """The ids of the lost workers."""
        return self._lost.keys()

    def get(self, worker_id: str) -> LostWorker | None:
        """Return a lost worker, or None if the worker is not lost."""
        return self._lost.get(worker_id)

    def registration_ended(
        self, worker: Worker, attached_s: float, attached: Iterable[Worker]
    ) -> None:
        """Add a worker, unless it has announced its end, or another was started in its place.

        `attached` are the workers that are still registered.
        """
        if worker.is_leaving or any(_is_replacement(one, worker) for one in attached):
            return
        self._lost[worker.worker_id] = LostWorker(worker, attached_s, self._clock())
        self._unreported[worker.worker_id] = None
        if len(self._lost) > MAX_COUNT:
            self._remove(next(iter(self._lost)))

    def registered(self, worker: Worker) -> None:
        """Remove a worker that is back, or in whose place another worker has started."""
        for worker_id, lost in list(self._lost.items()):
            if worker_id == worker.worker_id or _is_replacement(worker, lost.worker):
                self._remove(worker_id)

    async def run(self) -> NoReturn:
        """Report lost workers to the log, and remove them after `KEPT_S`, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.advance()

    def advance(self) -> None:
        """Report and remove the workers whose times are over now."""
        now = self._clock()
        for worker_id in list(self._unreported):
            lost = self._lost[worker_id]
            if now - lost.lost_at >= REPORT_AFTER_S:
                del self._unreported[worker_id]
                address = lost.worker.register.address
                _log.warning(
                    "worker %s at %s is lost: %s; %s",
                    *(worker_id, address, lost.reason, _sessions(lost.worker)),
                )
        for worker_id, lost in list(self._lost.items()):
            if now - lost.lost_at >= KEPT_S:
                self._remove(worker_id)

    def _remove(self, worker_id: str) -> None:
        del self._lost[worker_id]
        self._unreported.pop(worker_id, None)
        for listener in self.listeners:
            listener(worker_id)


def _is_replacement(worker: Worker, former: Worker) -> bool:
    """True if `worker` was registered later than `former`, at the same address."""
    return worker.epoch > former.epoch and worker.register.address == former.register.address


def _sessions(worker: Worker) -> str:
    """Return the sessions of a worker, for the log."""
    held = [slot for slot in worker.slots if slot.state == registry_pb2.SLOT_STATE_OCCUPIED]
    if not held:
        return "it had no session"
    names = [slot.session_id or slot.lease_id for slot in held[:_NAMED_COUNT]]
    more = ["..."] if len(held) > _NAMED_COUNT else []
    return f"it had {len(held)} sessions: {', '.join(names + more)}"
