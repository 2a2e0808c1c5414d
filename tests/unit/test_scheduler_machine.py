"""Store and policy together, over any history: what must hold at every step, restarts included."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
from scheduler_world import AUDIO, BROKEN, CLEANING, FREE, OCCUPIED, register_message

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.policy import Place, Verdict, assign, judge
from duplane.scheduler.store.base import (
    Change,
    End,
    Grant,
    GrantGone,
    GrantPut,
    Ticket,
    TicketGone,
    TicketPut,
    Wish,
    Worker,
)
from duplane.scheduler.store.memory import MemoryStore
from duplane.scheduler.view import View

BOOT_MS = 1_700_000_000_000
CLAIM_TIMEOUT_S = 5.0
WORKERS = ("w0", "w1")
POOLS = ("", "other")
SLOTS = 2
Answer = TypeVar("Answer")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(verb: Coroutine[Any, Any, Answer]) -> Answer:
    """Run a verb of a store that never waits."""
    try:
        verb.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the memory store waited")


@dataclass
class Outside:
    """A worker process: what it knows survives every scheduler."""

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
    """Workers come, report and go; callers come, leave, come back; schedulers die."""

    waiting = Bundle("waiting")
    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.boot_ms = BOOT_MS
        self.outside = [Outside(name, pool) for name, pool in zip(WORKERS, POOLS, strict=True)]
        self.names = itertools.count()
        self.highest: dict[tuple[str, int], int] = {}  # token given out per slot, for ever
        self.shown: dict[int, int] = {}  # position per ticket
        self.granted_at: dict[int, float] = {}  # by token
        self.open_tickets: dict[int, Ticket] = {}
        self.live: dict[tuple[str, int], Grant] = {}

    @initialize()
    def boot(self) -> None:
        self.store = MemoryStore(self.boot_ms, self.clock)
        self.view = View(self.clock)
        self.view.listeners.append(self.check_change)
        self.store.subscribe(self.view.apply)
        for which in range(len(WORKERS)):
            self.attach(which, is_new=False)

    def check_change(self, change: Change, moved: Sequence[Place]) -> None:
        match change:
            case TicketPut(ticket=ticket):
                self.open_tickets[ticket.order] = ticket
            case TicketGone(ticket=ticket, is_granted=is_granted):
                assert self.open_tickets.pop(ticket.order) == ticket, "ended twice"
                self.shown.pop(ticket.order, None)
                assert is_granted == (ticket.wish.request_id in self.live_requests())
            case GrantPut(grant=grant):
                self.check_grant(grant)
            case GrantGone(grant=grant, end=end):
                assert self.live.pop((grant.worker_id, grant.slot)).token == grant.token
                if end is End.EXPIRED:
                    assert self.clock.now - self.granted_at[grant.token] >= CLAIM_TIMEOUT_S
                    assert not grant.is_claimed
            case _:
                pass
        assert all(place.position < self.shown.get(place.ticket.order, 2**31) for place in moved)

    def live_requests(self) -> set[str]:
        return {grant.ticket.wish.request_id for grant in self.live.values() if grant.ticket}

    def check_grant(self, grant: Grant) -> None:
        place = (grant.worker_id, grant.slot)
        standing = self.live.get(place)
        if standing:
            assert standing.token == grant.token, "two live grants on one slot"
            assert grant.is_claimed >= standing.is_claimed, "a claim was taken back"
        elif grant.ticket:
            assert grant.token > self.highest.get(place, 0), "a token fell"
            self.highest[place] = grant.token
            self.granted_at[grant.token] = self.clock.now
            pool = grant.ticket.wish.pool
            ahead = [
                order
                for order, ticket in self.open_tickets.items()
                if ticket.wish.pool == pool and order < grant.ticket.order
            ]
            assert not ahead, "somebody was overtaken"
        self.live[place] = grant

    @rule(which=st.sampled_from(range(len(WORKERS))), is_new=st.booleans())
    def attach(self, which: int, is_new: bool) -> None:
        outside = self.outside[which]
        known = self.view.workers.get(outside.name)
        if is_new:
            outside.incarnation += 1
            outside.slots = None
        message = outside.message()
        worker = run(self.store.register(message))
        assert (worker is None) == bool(known and is_new)
        if worker is None:
            outside.incarnation -= 1
            outside.slots = list(known.register.slots) if known else None
            return
        assert worker.epoch > max(slot.fencing_number for slot in message.slots)
        self.settle(worker)

    @rule(
        which=st.sampled_from(range(len(WORKERS))),
        fault=st.sampled_from(["detach", "drain", "restart"]),
        milliseconds=st.integers(1, 10_000),
    )
    def fail(self, which: int, fault: str, milliseconds: int) -> None:
        worker = self.view.workers.get(self.outside[which].name)
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
        outside = self.outside[which]
        worker = self.view.workers.get(outside.name)
        if worker is None or outside.slots is None:
            return
        seen = outside.slots[slot].fencing_number
        outside.slots[slot] = registry_pb2.SlotReport(slot=slot, state=state, fencing_number=seen)
        self.send_report(outside, worker, is_draining)

    def send_report(self, outside: Outside, worker: Worker, is_draining: bool = False) -> None:
        said = replace(worker, register=outside.message(), is_draining=is_draining)
        assert run(self.store.report(said))
        self.settle(said)

    def settle(self, worker: Worker) -> None:
        for slot in worker.register.slots:
            grant = self.view.grant_of(worker.worker_id, slot.slot)
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
            ticket = run(self.store.enqueue(Wish(name, f"{name}/1", AUDIO, pool)))
            assert isinstance(ticket, Ticket)
            assert max(self.open_tickets) == ticket.order
            tickets.append(ticket)
        return multiple(*tickets)

    @rule(target=waiting, ticket=consumes(waiting))
    def call_again(self, ticket: Ticket) -> Any:
        owner = f"{ticket.wish.request_id}/{next(self.names)}"
        found = run(self.store.enqueue(replace(ticket.wish, owner=owner), ticket.order))
        if isinstance(found, Grant):
            assert found.ticket
            assert found.ticket.wish.request_id == ticket.wish.request_id
            return multiple()
        assert found.order == ticket.order, "the place was lost"
        return found

    @rule(ticket=consumes(waiting))
    def leave(self, ticket: Ticket) -> None:
        is_waiting = self.open_tickets.get(ticket.order) == ticket
        assert run(self.store.cancel(ticket.order, ticket.wish.owner)) == is_waiting

    @rule(target=grants)
    def place(self) -> Any:
        made: list[Grant] = []
        for pool in self.view.pools:
            for due in assign(self.view.queue(pool), self.view.pool_candidates(pool)):
                proposal = Grant(
                    token=0,
                    lease_id=f"lease{next(self.names)}",
                    worker_id=due.worker.worker_id,
                    worker_epoch=due.worker.epoch,
                    slot=due.slot,
                    kind=AUDIO,
                    ticket=due.ticket,
                )
                grant = run(self.store.try_grant(proposal, CLAIM_TIMEOUT_S))
                assert grant, "policy proposed what the store refuses"
                worker = self.view.workers[grant.worker_id]
                assert worker.takes_sessions
                assert worker.register.slots[grant.slot].state == FREE
                made.append(grant)
                # The same again, as another scheduler might try that has not heard yet.
                assert run(self.store.try_grant(proposal, CLAIM_TIMEOUT_S)) is None
        return multiple(*made)

    @rule(grant=grants)
    def claim(self, grant: Grant) -> None:
        """The worker is the last word: it takes any number above all that it has seen."""
        outside = self.outside[WORKERS.index(grant.worker_id)]
        worker = self.view.workers.get(grant.worker_id)
        if worker is None or outside.slots is None:
            return
        slot = outside.slots[grant.slot]
        if slot.state != FREE or grant.token <= slot.fencing_number:
            return
        outside.slots[grant.slot] = registry_pb2.SlotReport(
            slot=grant.slot, state=OCCUPIED, fencing_number=grant.token, lease_id=grant.lease_id
        )
        self.send_report(outside, worker)
        standing = self.live.get((grant.worker_id, grant.slot))
        # A late claim of a void lease may come before the worker hears that it is void; the
        # slot's next grant, of a higher number, is then refused by the worker or expires.
        assert standing is None or standing.is_claimed or standing.token > grant.token

    @rule(pick=st.integers(0, 3))
    def serve(self, pick: int) -> None:
        """The usual course: an unclaimed grant is claimed, a claimed one ends and is clean."""
        live = sorted(self.live.values(), key=lambda grant: grant.token)
        grant = live[pick] if pick < len(live) else None
        if grant is None:
            return
        if not grant.is_claimed:
            self.claim(grant)
        else:
            self.report(WORKERS.index(grant.worker_id), grant.slot, FREE, is_draining=False)
            assert grant.token not in {one.token for one in self.live.values()}

    @rule(grant=grants)
    def give_back(self, grant: Grant) -> None:
        standing = self.live.get((grant.worker_id, grant.slot))
        is_standing = standing is not None and standing.token == grant.token
        assert run(self.store.give_back(grant)) == is_standing

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        left_s = self.store.expire()
        assert left_s is None or 0 < left_s <= CLAIM_TIMEOUT_S
        overdue = [
            grant
            for grant in self.live.values()
            if not grant.is_claimed
            and self.clock.now - self.granted_at[grant.token] >= CLAIM_TIMEOUT_S
        ]
        assert not overdue

    def restart(self, milliseconds: int) -> None:
        """The scheduler dies; a new one knows nothing, and numbers go on rising."""
        self.boot_ms += milliseconds
        for gone in (self.open_tickets, self.shown, self.live):
            gone.clear()
        self.boot()

    @invariant()
    def places_never_grow(self) -> None:
        for place in self.view.places() if hasattr(self, "view") else ():
            order = place.ticket.order
            assert 1 <= place.position <= self.shown.get(order, place.position)
            self.shown[order] = place.position

    @invariant()
    def view_holds_what_was_told(self) -> None:
        if hasattr(self, "view"):
            assert self.view.tickets == self.open_tickets
            assert set(self.view.wishes) == self.live_requests() | {
                ticket.wish.request_id for ticket in self.open_tickets.values()
            }
            assert {grant.token for grant in self.view.grants.values()} == {
                grant.token for grant in self.live.values()
            }


SchedulerHistory.TestCase.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None
)
test_scheduler_history = SchedulerHistory.TestCase
