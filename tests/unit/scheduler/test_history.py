"""Store and policy together: laws that hold after every step of any history with restarts."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from support.clock import Clock
from support.scheduler.scheduler_harness import (
    AUDIO,
    BROKEN,
    CLEANING,
    FREE,
    OCCUPIED,
    register_message,
)
from support.scheduler.store_history import CLAIM_TIMEOUT_S, slot_key

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.policy.fair_queue import QueueEntry
from duplane.scheduler.policy.slot_reports import Verdict, judge
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    Offer,
    Ticket,
    TicketGone,
    TicketPut,
    Worker,
)
from duplane.scheduler.store.memory import MemoryStore

pytestmark = pytest.mark.slow

BOOT_MS = 1_700_000_000_000
WORKERS = ("w0", "w1")
POOLS = ("", "other")
SLOTS = 2
Answer = TypeVar("Answer")


def run(operation: Coroutine[Any, Any, Answer]) -> Answer:
    """Run a store operation that never waits."""
    try:
        operation.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the memory store waited")


@dataclass
class WorkerProcess:
    """A worker process. Its state survives restarts of the scheduler."""

    name: str
    pool: str
    incarnation: int = 0
    slots: list[registry_pb2.SlotReport] | None = None

    def message(self) -> registry_pb2.Register:
        self.slots = self.slots or [
            registry_pb2.SlotReport(slot=slot, state=FREE) for slot in range(SLOTS)
        ]
        incarnation = f"{self.name}/{self.incarnation}"
        return register_message(
            self.name, incarnation=incarnation, pool=self.pool, slots=self.slots
        )


class SchedulerHistory(RuleBasedStateMachine):
    """Workers attach, report and detach; callers join, leave and return; schedulers restart."""

    waiting = Bundle("waiting")
    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.boot_ms = BOOT_MS
        self.processes = [
            WorkerProcess(name, pool) for name, pool in zip(WORKERS, POOLS, strict=True)
        ]
        self.names = itertools.count()
        self.highest: dict[tuple[str, int], int] = {}  # highest fencing number granted per slot
        self.shown: dict[int, int] = {}  # last position shown per ticket
        self.granted_at: dict[int, float] = {}  # key: the fencing number
        self.open_tickets: dict[int, Ticket] = {}
        self.live: dict[tuple[str, int], Grant] = {}
        # Grants that ended unclaimed, and of which no revoke was delivered to the worker yet.
        self.void: list[Grant] = []

    @initialize()
    def boot(self) -> None:
        self.store = MemoryStore(self.boot_ms, self.clock)
        self.state = SchedulerState(self.clock)
        self.state.listeners.append(self.check_change)
        self.state.position_listeners.append(self.check_moved)
        self.store.subscribe(self.state.apply)
        for which in range(len(WORKERS)):
            self.attach(which, is_new=False)

    def check_change(self, change: Change) -> None:
        match change:
            case TicketPut(ticket=ticket):
                self.open_tickets[ticket.order] = ticket
            case TicketGone(ticket=ticket, is_granted=is_granted):
                assert self.open_tickets.pop(ticket.order) == ticket, "ended twice"
                self.shown.pop(ticket.order, None)
                assert is_granted == (ticket.request.request_id in self.live_requests())
            case GrantPut(grant=grant):
                self.check_grant(grant)
            case GrantGone(grant=grant, end=end):
                assert (
                    self.live.pop(slot_key(grant)).claims.fencing_number
                    == grant.claims.fencing_number
                )
                if end in (GrantEnd.RETURNED, GrantEnd.EXPIRED):
                    self.void.append(grant)
                if end is GrantEnd.EXPIRED:
                    assert (
                        self.clock.now_s - self.granted_at[grant.claims.fencing_number]
                        >= CLAIM_TIMEOUT_S
                    )
                    assert not grant.is_claimed
            case _:
                pass

    def check_moved(self, moved: Sequence[QueueEntry]) -> None:
        for entry in moved:
            assert entry.position <= self.shown.get(entry.ticket.order, entry.position)
            self.shown[entry.ticket.order] = entry.position

    @rule(limit=st.integers(1, 3))
    def publish_positions(self, limit: int) -> None:
        self.state.publish_positions(limit)

    def live_requests(self) -> set[str]:
        return {grant.ticket.request.request_id for grant in self.live.values() if grant.ticket}

    def check_grant(self, grant: Grant) -> None:
        key = slot_key(grant)
        present = self.live.get(key)
        if present:
            assert present.claims.fencing_number == grant.claims.fencing_number, (
                "two live grants on one slot"
            )
            assert grant.is_claimed >= present.is_claimed, "a claim was taken back"
        elif grant.ticket:
            assert grant.claims.fencing_number > self.highest.get(key, 0), "a fencing number fell"
            self.highest[key] = grant.claims.fencing_number
            self.granted_at[grant.claims.fencing_number] = self.clock.now_s
            pool = grant.ticket.request.pool
            ahead = [
                order
                for order, ticket in self.open_tickets.items()
                if ticket.request.pool == pool and order < grant.ticket.order
            ]
            assert not ahead, "a ticket was overtaken"
        self.live[key] = grant

    @rule(which=st.sampled_from(range(len(WORKERS))), is_new=st.booleans())
    def attach(self, which: int, is_new: bool) -> None:
        process = self.processes[which]
        known = self.state.workers.get(process.name)
        if is_new:
            process.incarnation += 1
            process.slots = None
        message = process.message()
        worker = run(self.store.register(message))
        assert (worker is None) == bool(known and is_new)
        if worker is None:
            process.incarnation -= 1
            process.slots = list(known.slots) if known else None
            return
        assert worker.epoch > max(slot.fencing_number for slot in message.slots)
        self.settle(worker)

    @rule(
        which=st.sampled_from(range(len(WORKERS))),
        fault=st.sampled_from(["detach", "drain", "restart"]),
        milliseconds=st.integers(1, 10_000),
    )
    def fail(self, which: int, fault: str, milliseconds: int) -> None:
        worker = self.state.workers.get(self.processes[which].name)
        if fault == "restart":
            self.restart(milliseconds)
        elif worker and fault == "drain":
            assert run(self.store.drain(worker.worker_id))
        elif worker:
            assert run(self.store.unregister(worker.worker_id, worker.epoch))

    @rule(
        which=st.sampled_from(range(len(WORKERS))),
        slot=st.integers(0, SLOTS - 1),
        state=st.sampled_from([FREE, FREE, FREE, CLEANING, BROKEN]),
        is_draining=st.sampled_from([False, False, False, True]),
    )
    def report(
        self, which: int, slot: int, state: registry_pb2.SlotState, is_draining: bool
    ) -> None:
        process = self.processes[which]
        worker = self.state.workers.get(process.name)
        if worker is None or process.slots is None:
            return
        seen = process.slots[slot].fencing_number
        process.slots[slot] = registry_pb2.SlotReport(slot=slot, state=state, fencing_number=seen)
        self.send_report(process, worker, is_draining)

    def send_report(
        self, process: WorkerProcess, worker: Worker, is_draining: bool = False
    ) -> None:
        slots = tuple(process.message().slots)
        said = replace(worker, slots=slots, is_draining=is_draining)
        assert run(self.store.report(said))
        self.settle(said)

    def settle(self, worker: Worker) -> None:
        for slot in worker.slots:
            grant = self.state.grant_of(worker.worker_id, slot.slot)
            verdict = judge(grant, slot)
            if grant and verdict is Verdict.CLAIMED:
                run(self.store.claim(grant))
            elif grant and verdict is Verdict.ENDED:
                run(self.store.release(grant))

    @rule(target=waiting, pools=st.lists(st.sampled_from(POOLS), min_size=1, max_size=4))
    def join(self, pools: list[str]) -> Any:
        tickets: list[Ticket] = []
        for pool in pools:
            name = f"r{next(self.names)}"
            request = lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO, pool=pool)
            ticket = run(self.store.enqueue(request, f"{name}/1"))
            assert isinstance(ticket, Ticket)
            assert max(self.open_tickets) == ticket.order
            tickets.append(ticket)
        return multiple(*tickets)

    @rule(target=waiting, ticket=consumes(waiting))
    def call_again(self, ticket: Ticket) -> Any:
        owner = f"{ticket.request.request_id}/{next(self.names)}"
        found = run(self.store.enqueue(ticket.request, owner, ticket.order))
        if isinstance(found, Grant):
            assert found.ticket
            assert found.ticket.request.request_id == ticket.request.request_id
            return multiple()
        assert found.order == ticket.order, "the order was lost"
        return found

    @rule(ticket=consumes(waiting))
    def leave(self, ticket: Ticket) -> None:
        is_waiting = self.open_tickets.get(ticket.order) == ticket
        assert run(self.store.cancel(ticket.order, ticket.owner)) == is_waiting

    @rule()
    def deliver_revokes(self) -> None:
        for grant in self.void:
            process = self.processes[WORKERS.index(grant.claims.worker_id)]
            worker = self.state.workers.get(process.name)
            if process.slots is not None and worker and worker.epoch == grant.claims.worker_epoch:
                slot = process.slots[grant.claims.slot]
                slot.fencing_number = max(slot.fencing_number, grant.claims.fencing_number)
                self.send_report(process, worker)
        self.void.clear()

    @rule(target=grants)
    def grant_all(self) -> Any:
        made: list[Grant] = []
        for pool in self.state.waiting_pools:
            while proposal := self.state.next_grant(pool):
                ticket, candidate = proposal
                claims = lease_pb2.LeaseClaims(
                    lease_id=f"lease{next(self.names)}",
                    worker_id=candidate.worker.worker_id,
                    worker_epoch=candidate.worker.epoch,
                    slot=candidate.free_slots[0],
                    kind=AUDIO,
                )
                grant = run(self.store.try_grant(ticket, Offer(claims, CLAIM_TIMEOUT_S)))
                assert grant, "policy proposed what the store refuses"
                worker = self.state.workers[grant.claims.worker_id]
                assert worker.takes_sessions
                reported = worker.slots[grant.claims.slot]
                assert reported.state == FREE
                assert not any(
                    slot_key(void) == slot_key(grant)
                    and void.claims.worker_epoch == worker.epoch
                    and void.claims.fencing_number > reported.fencing_number
                    for void in self.void
                ), "granted before the worker knew that the former grant is void"
                made.append(grant)
                # Another scheduler may try the same grant again before it sees this grant.
                assert run(self.store.try_grant(ticket, Offer(claims, CLAIM_TIMEOUT_S))) is None
        return multiple(*made)

    @rule(grant=grants)
    def claim(self, grant: Grant) -> None:
        """Claim a grant. The worker accepts it only if its fencing number is above the slot's."""
        process = self.processes[WORKERS.index(grant.claims.worker_id)]
        worker = self.state.workers.get(grant.claims.worker_id)
        if worker is None or process.slots is None:
            return
        slot = process.slots[grant.claims.slot]
        if slot.state != FREE or grant.claims.fencing_number <= slot.fencing_number:
            return
        process.slots[grant.claims.slot] = registry_pb2.SlotReport(
            slot=grant.claims.slot,
            state=OCCUPIED,
            fencing_number=grant.claims.fencing_number,
            lease_id=grant.claims.lease_id,
        )
        self.send_report(process, worker)
        present = self.live.get(slot_key(grant))
        # A late claim of a void lease may reach the worker before the revoke of this lease. The
        # slot's next grant has a higher number, so the late claim does not block the next grant.
        assert (
            present is None
            or present.is_claimed
            or present.claims.fencing_number > grant.claims.fencing_number
        )

    @rule(pick=st.integers(0, 3))
    def serve(self, pick: int) -> None:
        """Claim a grant that is unclaimed, or end a claimed grant with a clean slot."""
        live = sorted(self.live.values(), key=lambda grant: grant.claims.fencing_number)
        grant = live[pick] if pick < len(live) else None
        if grant is None:
            return
        if not grant.is_claimed:
            self.claim(grant)
        else:
            self.report(
                WORKERS.index(grant.claims.worker_id), grant.claims.slot, FREE, is_draining=False
            )
            assert grant.claims.fencing_number not in {
                one.claims.fencing_number for one in self.live.values()
            }

    @rule(grant=grants)
    def give_back(self, grant: Grant) -> None:
        present = self.live.get(slot_key(grant))
        is_present = (
            present is not None and present.claims.fencing_number == grant.claims.fencing_number
        )
        assert run(self.store.give_back(grant)) == is_present

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.clock.now_s += seconds
        left_s = self.store.expire()
        assert left_s is None or 0 < left_s <= CLAIM_TIMEOUT_S
        overdue = [
            grant
            for grant in self.live.values()
            if not grant.is_claimed
            and self.clock.now_s - self.granted_at[grant.claims.fencing_number] >= CLAIM_TIMEOUT_S
        ]
        assert not overdue

    def restart(self, milliseconds: int) -> None:
        """Replace the scheduler by one with an empty state; fencing numbers keep rising."""
        self.boot_ms += milliseconds
        for gone in (self.open_tickets, self.shown, self.live, self.void):
            gone.clear()
        self.boot()

    @invariant()
    def positions_never_grow(self) -> None:
        for order, ticket in self.state.tickets.items() if hasattr(self, "state") else ():
            entry = self.state.entry(ticket)
            assert entry
            assert 1 <= entry.position <= self.shown.get(order, entry.position)
            self.shown[order] = entry.position

    @invariant()
    def state_holds_what_was_published(self) -> None:
        if hasattr(self, "state"):
            assert self.state.tickets == self.open_tickets
            assert set(self.state.requests) == self.live_requests() | {
                ticket.request.request_id for ticket in self.open_tickets.values()
            }
            assert {grant.claims.fencing_number for grant in self.state.grants.values()} == {
                grant.claims.fencing_number for grant in self.live.values()
            }


SchedulerHistory.TestCase.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None
)
test_scheduler_history = SchedulerHistory.TestCase
