"""Large revisions of etcd are applied in portions. No decision is made between two portions.

The schedulers and etcd are those of the simulation, on virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest
from simulation.calls import Schedulers, schedulers_of, simulated
from simulation.scheduler import Scheduler
from support.scheduler.scheduler_harness import AUDIO, register_message

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantGone,
    GrantPut,
    Ticket,
    TicketGone,
    TicketPut,
    Worker,
    WorkerGone,
    WorkerPut,
)
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.keys import Keys
from duplane.scheduler.store.etcd.mirror import PORTION
from duplane.scheduler.store.etcd.records import (
    Slot,
    reports_value,
    request_value,
    slot_value,
    worker_value,
)
from duplane.scheduler.store.etcd.store import EtcdStore

KEYS = Keys("/duplane/")
WORKER_COUNT, SLOT_COUNT, TICKET_COUNT = 80, 8, 240
KEY_COUNT = WORKER_COUNT * (2 + 2 * SLOT_COUNT) + 2 * TICKET_COUNT  # about 2,000; a portion has 64
LEASE = 4711
SETTLED_S = 30.0


class Turns:
    """Measures how much work is done in one pass of the event loop, at most."""

    def __init__(self) -> None:
        self.longest = self._in_turn = 0

    def count(self) -> None:
        if not self._in_turn:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._in_turn += 1
        self.longest = max(self.longest, self._in_turn)

    def _end_turn(self) -> None:
        self._in_turn = 0


def put(key: bytes, value: bytes) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value, lease=LEASE))


def request(name: str) -> lease_pb2.AcquireLeaseRequest:
    return lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO)


def worker_puts(name: str, slot_count: int, epoch: int) -> Iterable[etcd_pb2.RequestOp]:
    worker = Worker.of(epoch, register_message(name, slot_count))
    yield put(KEYS.worker(name), worker_value(worker, 0))
    yield put(KEYS.reports(name), reports_value(worker.slots))
    for report in worker.slots:
        yield put(KEYS.report(name, report.slot), report.SerializeToString())
    yield put(KEYS.epoch(name), b"")


def grant_puts(name: str, slot: int, number: int) -> Iterable[etcd_pb2.RequestOp]:
    ticket = Ticket(number, "owner", request(f"{name}/{slot}"))
    claims = lease_pb2.LeaseClaims(
        lease_id=f"{name}/{slot}",
        worker_id=name,
        worker_epoch=1,
        slot=slot,
        fencing_number=number,
        kind=AUDIO,
    )
    value = slot_value(Slot(Grant(claims, ticket, is_claimed=True), 5.0, None), 0)
    yield put(KEYS.slot((name, slot)), value)
    yield put(KEYS.request(f"{name}/{slot}"), request_value(ticket, 0, is_granted=True))


def ticket_puts(order: int) -> Iterable[etcd_pb2.RequestOp]:
    ticket = Ticket(order, f"owner {order}", request(f"r{order}"))
    yield put(KEYS.request(f"r{order}"), request_value(ticket, 0, is_granted=False))
    yield put(KEYS.order(order), b"")


def content(ticket_count: int = TICKET_COUNT) -> Iterable[etcd_pb2.RequestOp]:
    """Yield puts of the keys of a scheduler with many workers, grants and tickets."""
    for worker in range(WORKER_COUNT):
        yield from worker_puts(f"w{worker}", SLOT_COUNT, 1)
        for slot in range(SLOT_COUNT):
            yield from grant_puts(f"w{worker}", slot, worker * SLOT_COUNT + slot + 1)
    for order in range(ticket_count):
        yield from ticket_puts(100_000 + order)


def write(fabric: Schedulers, changes: Iterable[etcd_pb2.RequestOp]) -> None:
    """Write keys in one revision, with the lease of a scheduler that is not simulated."""
    fabric.etcd.grant(LEASE, 1000)
    session = put(KEYS.session(f"{LEASE:x}"), b"")
    presence = put(KEYS.presence(f"{LEASE:x}"), b"")
    fabric.etcd.execute(etcd_pb2.TxnRequest(success=[session, presence, *changes]))


def missed(fabric: Schedulers, changes: Iterable[etcd_pb2.RequestOp]) -> None:
    """Write keys whose events the first scheduler misses, so that it reads all keys later."""
    fabric.clients[0].cut(1)
    write(fabric, changes)
    fabric.etcd.compact()


async def until(scheduler: Scheduler, revision: int) -> None:
    assert isinstance(scheduler.store, EtcdStore)
    async with asyncio.timeout(SETTLED_S):
        await scheduler.store._mirror.reached(revision)


@pytest.mark.parametrize("are_missed", [False, True], ids=["events", "missed events"])
def test_large_revision_lets_other_tasks_run(
    monkeypatch: pytest.MonkeyPatch, are_missed: bool
) -> None:
    async def main() -> None:
        async with schedulers_of(1) as fabric:
            (scheduler,), seen = fabric.schedulers, list[Change]()
            turns, apply_one = Turns(), Facts._apply_one

            def counted(facts: Facts, *arguments: object) -> None:
                turns.count()
                apply_one(facts, *arguments)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # as called

            monkeypatch.setattr(Facts, "_apply_one", counted)

            def on_change(change: Change) -> None:
                turns.count()
                seen.append(change)

            scheduler.state.listeners.append(on_change)
            (missed if are_missed else write)(fabric, content())
            await until(scheduler, fabric.etcd.revision)
            assert counts(seen, WorkerPut, GrantPut, TicketPut) == COUNTS
            assert len(scheduler.state.grants) == WORKER_COUNT * SLOT_COUNT
            seen.clear()
            if are_missed:
                fabric.clients[0].cut(1)
            fabric.etcd.revoke(LEASE)  # the scheduler with this lease has died
            if are_missed:
                fabric.etcd.compact()
            await until(scheduler, fabric.etcd.revision)
            assert counts(seen, WorkerGone, GrantGone, TicketGone) == COUNTS
            assert not scheduler.state.workers
            assert 0 < turns.longest <= PORTION

    simulated(main())


COUNTS = [WORKER_COUNT, WORKER_COUNT * SLOT_COUNT, TICKET_COUNT]


def counts(changes: Sequence[Change], *kinds: type[Change]) -> Sequence[int]:
    return [sum(isinstance(change, kind) for change in changes) for kind in kinds]


def test_operation_is_answered_only_from_a_whole_revision() -> None:
    """A ticket is in the copy of etcd's content before subscribers get it.

    The operation that takes the ticket over must wait until subscribers have it.
    """

    async def main() -> None:
        async with schedulers_of(1) as fabric:
            (scheduler,), answers = fabric.schedulers, list[asyncio.Task[object]]()

            async def take_over() -> object:
                found = await scheduler.store.enqueue(request("r200000"), "owner 200000")
                assert isinstance(found, Ticket)
                assert found.order in scheduler.state.tickets
                return found

            def on_change(change: Change) -> None:
                if not answers:
                    answers.append(asyncio.create_task(take_over()))

            scheduler.state.listeners.append(on_change)
            write(fabric, [*content(), *ticket_puts(200_000)])
            await until(scheduler, fabric.etcd.revision)
            await answers[0]

    simulated(main())


def test_grant_is_chosen_only_from_a_whole_revision() -> None:
    """A free slot is published before the ticket that returns to the front of the queue."""

    async def main() -> None:
        async with schedulers_of(1) as fabric:
            (scheduler,), granted = fabric.schedulers, asyncio.Queue[int]()
            write(fabric, ticket_puts(50_000))
            await until(scheduler, fabric.etcd.revision)
            assert list(scheduler.state.tickets) == [50_000]

            def on_change(change: Change) -> None:
                match change:
                    case GrantPut(grant=Grant(ticket=Ticket(order=order)) as grant) if (
                        grant.claims.worker_id == "free"
                    ):
                        granted.put_nowait(order)
                    case _:
                        pass

            scheduler.state.listeners.append(on_change)
            free = worker_puts("free", SLOT_COUNT + 1, 1)  # preferred to the others
            missed(fabric, [*free, *content(0), *ticket_puts(40_000)])
            async with asyncio.timeout(SETTLED_S):
                assert await granted.get() == 40_000

    simulated(main())
