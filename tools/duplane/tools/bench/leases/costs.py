"""`duplane bench leases --policy-only`: the cost of one decision of the scheduler, by fabric size.

Runs the scheduler's parts over the memory store, without sockets. Times are CPU times of this
process, so other processes change the results little.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.granting import GrantLoop
from duplane.scheduler.messages import queued
from duplane.scheduler.position_updates import PositionUpdates
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Change, Grant, GrantPut, Ticket
from duplane.scheduler.store.memory import MemoryStore
from duplane.tools.bench.report import percentile, show

# Each line is a fabric: its number of workers, of waiting tickets, and of values of a label. Each
# worker has one of the values, and each ticket needs one. One value means that labels are not used.
SIZES = (
    (10, 100, 1),
    (100, 1_000, 1),
    (1_000, 10_000, 1),
    (10_000, 100_000, 1),
    (1_000, 10_000, 1_000),
)
_SLOT_COUNT = 8
_SAMPLE_COUNT = 300
_KIND = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
Answer = TypeVar("Answer")


def _run(operation: Coroutine[Any, Any, Answer]) -> Answer:
    """Run an operation of the memory store. Such an operation never waits."""
    try:
        operation.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("the memory store waited")


@dataclass
class _Costs:
    """CPU seconds of each measured operation."""

    enqueue: list[float] = field(default_factory=list[float])
    regrant: list[float] = field(default_factory=list[float])
    position: list[float] = field(default_factory=list[float])
    turns: list[float] = field(default_factory=list[float])

    def row(self, worker_count: int, ticket_count: int, label_count: int) -> Sequence[str]:
        medians = (percentile(one, 0.5) for one in (self.enqueue, self.regrant, self.position))
        return (
            f"{worker_count:,} workers, {ticket_count:,} waiting"
            + (f", {label_count:,} label sets" if label_count > 1 else ""),
            *(f"{seconds * 1e6:.0f}" for seconds in medians),
            f"{max(self.turns) * 1e3:.1f}",
        )


class _Fabric:
    """A full fabric: every slot is leased, and tickets wait."""

    def __init__(self, worker_count: int, ticket_count: int, label_count: int) -> None:
        self.store = MemoryStore(boot_ms=1)
        self.state = SchedulerState(time.monotonic)
        self.grant_loop = GrantLoop(self.store, self.state, 3600.0, 0.0)
        self.position_updates = PositionUpdates(self.state)
        self.store.subscribe(self.state.apply)
        self.random = random.Random(1)
        self.needs = [{"set": str(one)} if label_count > 1 else {} for one in range(label_count)]
        self.enqueue_count = 0
        for number in range(worker_count):
            _run(self.store.register(_register(number, self.needs[number % label_count])))
        for _ in range(worker_count * _SLOT_COUNT):
            self.enqueue()
            self.grant()
        for _ in range(ticket_count):
            self.enqueue()
        self.leases = list(self.state.grants)
        self.state.listeners.append(self._on_change)

    def enqueue(self) -> None:
        needs = self.needs[self.enqueue_count % len(self.needs)]
        self.enqueue_count += 1
        request_id = uuid.uuid4().hex
        request = lease_pb2.AcquireLeaseRequest(request_id=request_id, kind=_KIND, needs=needs)
        _run(self.store.enqueue(request, "bench"))

    def grant(self) -> Grant:
        proposal = self.state.next_grant("")
        if proposal is None:
            raise RuntimeError("no slot is free")
        ticket, candidate = proposal
        offer = self.grant_loop.offer(ticket.request, candidate)
        grant = _run(self.store.try_grant(ticket, offer))
        if grant is None or not _run(self.store.claim(grant)):
            raise RuntimeError("the store refused a grant")
        return grant

    def release(self) -> None:
        """Release any lease."""
        index = self.random.randrange(len(self.leases))
        self.leases[index], self.leases[-1] = self.leases[-1], self.leases[index]
        _run(self.store.release(self.state.grants[self.leases.pop()]))

    def regrant(self) -> None:
        self.release()
        self.grant()

    def _on_change(self, change: Change) -> None:
        match change:
            case GrantPut(grant=grant) if not grant.is_claimed:
                self.leases.append(grant.claims.lease_id)
            case _:
                pass

    def any_ticket(self) -> Ticket:
        """Return a ticket anywhere in the queue."""
        return self.random.choice(list(self.state.tickets.values()))

    def show_position(self, ticket: Ticket) -> None:
        entry = self.state.entry(ticket)
        if entry:
            queued(entry, self.state)


def _register(number: int, labels: Mapping[str, str]) -> registry_pb2.Register:
    free = registry_pb2.SLOT_STATE_FREE
    return registry_pb2.Register(
        worker_id=f"w{number}",
        incarnation=f"w{number}",
        kinds=[_KIND],
        labels=labels,
        slots=[registry_pb2.SlotReport(slot=slot, state=free) for slot in range(_SLOT_COUNT)],
    )


def _timed(operation: Callable[[], object]) -> float:
    begin = time.thread_time()
    operation()
    return time.thread_time() - begin


def _costs(worker_count: int, ticket_count: int, label_count: int) -> _Costs:
    fabric, costs = _Fabric(worker_count, ticket_count, label_count), _Costs()
    for _ in range(_SAMPLE_COUNT):
        costs.enqueue.append(_timed(fabric.enqueue))
        costs.regrant.append(_timed(fabric.regrant))
        ticket = fabric.any_ticket()
        costs.position.append(_timed(lambda ticket=ticket: fabric.show_position(ticket)))
    costs.turns = asyncio.run(_turns(fabric))
    return costs


async def _turns(fabric: _Fabric) -> list[float]:
    """Run the scheduler's loops under load; return the CPU time of each pass of the event loop."""
    turns: list[float] = []
    loops = [
        asyncio.create_task(fabric.grant_loop.run()),
        asyncio.create_task(fabric.position_updates.run()),
    ]
    for _ in range(_SAMPLE_COUNT):
        ticket = fabric.any_ticket()
        begin = time.thread_time()
        fabric.release()
        fabric.enqueue()
        fabric.show_position(ticket)
        await asyncio.sleep(0)
        turns.append(time.thread_time() - begin)
        await asyncio.sleep(0.002)
    for loop in loops:
        loop.cancel()
    return turns


def bench_lease_costs(sizes: Sequence[tuple[int, int, int]] = SIZES) -> None:
    """Measure fabrics of some numbers of workers and tickets, and print the table."""
    rows: list[Sequence[str]] = []
    for size in sizes:
        rows.append(_costs(*size).row(*size))
        gc.collect()  # frees the measured fabric, whose objects refer to each other
    show(
        f"scheduler without sockets, {_SLOT_COUNT} slots per worker, all held; CPU time",
        ("", "enqueue us", "release and grant us", "position us", "longest turn ms"),
        rows,
    )
