"""Counts of slots and workers by their state, kept up to date with every change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantGone,
    GrantPut,
    Worker,
    WorkerGone,
    WorkerPut,
)

SLOT_STATES = ("free", "withheld", "granted", "occupied", "cleaning", "broken", "unavailable")
WORKER_STATES = ("ready", "draining", "silent", "unreachable", "lost")
_SLOT_STATES = {
    registry_pb2.SLOT_STATE_OCCUPIED: "occupied",
    registry_pb2.SLOT_STATE_CLEANING: "cleaning",
    registry_pb2.SLOT_STATE_BROKEN: "broken",
}


class SlotCounts:
    """Counts slots and workers. Reading a count takes the same time for any number of workers."""

    def __init__(self, state: SchedulerState) -> None:
        self.pools: Counter[str] = Counter()  # attached workers, by pool
        self._workers: Counter[str] = Counter()  # attached workers, by state
        self._state = state
        self._slots: Counter[tuple[str, str]] = Counter()  # by pool and state
        # Worker id -> the worker's pool, state and states of slots, as they are counted.
        self._counted: dict[str, tuple[str, str, list[str]]] = {}
        state.listeners.append(self._on_change)

    def by_state(self, pools: Iterable[str]) -> Iterable[tuple[tuple[str, str], int]]:
        """Return the number of slots of each pool and state."""
        keys = [(pool, state) for pool in pools or ("",) for state in SLOT_STATES]
        return [(key, self._slots[key]) for key in keys]

    def workers_by_state(self) -> Iterable[tuple[str, int]]:
        """Return the number of workers of each state."""
        counts = {**self._workers, "lost": len(self._state.lost_workers)}
        return [(state, counts.get(state, 0)) for state in WORKER_STATES]

    def _on_change(self, change: Change) -> None:
        match change:
            case WorkerPut(worker=worker) | WorkerGone(worker=worker):
                self._count(worker.worker_id)
            case GrantPut(grant=grant) | GrantGone(grant=grant):
                self._count_slot(grant.claims.worker_id, grant.claims.slot)
            case _:
                pass

    def _count(self, worker_id: str) -> None:
        """Update a worker's part of the counts."""
        if former := self._counted.pop(worker_id, None):
            self._add(*former, -1)
        if worker := self._state.workers.get(worker_id):
            slots = [
                slot_state(worker, slot, self._state.grant_of(worker_id, slot.slot))
                for slot in worker.slots
            ]
            counted = worker.register.pool, worker_state(worker), slots
            self._counted[worker_id] = counted
            self._add(*counted, 1)

    def _count_slot(self, worker_id: str, number: int) -> None:
        """Update the part of one slot."""
        worker = self._state.workers.get(worker_id)
        pool, _, slots = self._counted.get(worker_id, ("", "", []))
        if worker and number < len(slots):
            report = worker.slots[number]
            grant = self._state.grant_of(worker_id, number)
            self._slots[pool, slots[number]] -= 1
            slots[number] = slot_state(worker, report, grant)
            self._slots[pool, slots[number]] += 1

    def _add(self, pool: str, state: str, slots: list[str], sign: int) -> None:
        self._workers[state] += sign
        for slot in slots:
            self._slots[pool, slot] += sign
        self.pools[pool] += sign
        if not self.pools[pool]:
            del self.pools[pool]
            for slot in SLOT_STATES:
                del self._slots[pool, slot]


def slot_state(worker: Worker, slot: registry_pb2.SlotReport, grant: Grant | None) -> str:
    """Return the state of a slot, from its worker's report and from its grant."""
    if slot.state in _SLOT_STATES:
        return _SLOT_STATES[slot.state]
    if grant:
        return "occupied" if grant.is_claimed else "granted"
    if not worker.takes_sessions:
        return "unavailable"
    return "withheld" if slot.is_withheld else "free"


def worker_state(worker: Worker) -> str:
    """Return the state of a worker; if several states apply, the worst of them."""
    if worker.is_unreachable:
        return "unreachable"
    if worker.is_silent:
        return "silent"
    return "ready" if worker.takes_sessions else "draining"
