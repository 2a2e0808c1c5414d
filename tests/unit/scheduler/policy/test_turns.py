"""Turns of tenants: fair among tenants, FIFO within each, and equal to the FIFO order with one."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.scheduler.scheduler_harness import AUDIO, CHAT, OMNI

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.fair_queue import FairQueue
from duplane.scheduler.policy.turns import Turns, merged
from duplane.scheduler.store.base import Ticket

KINDS = (AUDIO, CHAT, OMNI)


def ticket(
    order: int, tenant_id: str, kind: lease_pb2.SessionKind = AUDIO, *, was_granted: bool = False
) -> Ticket:
    request = lease_pb2.AcquireLeaseRequest(
        request_id=f"r{order}", kind=kind, tenant_id=tenant_id, was_granted=was_granted
    )
    ticket = Ticket(order, "", request)
    if was_granted:
        request.ticket_id = ticket.ticket_id
    return ticket


class Line:
    """The tickets that wait, in the order that the rules say, computed in the plainest way."""

    def __init__(self) -> None:
        self.tickets: dict[int, Ticket] = {}
        self.last_numbers: dict[str, int] = {}

    def orders(self) -> list[int]:
        returned = sorted(one.order for one in self.tickets.values() if one.request.was_granted)
        lines: dict[str, list[int]] = {}
        for order in sorted(self.tickets.keys() - set(returned)):
            lines.setdefault(self.tickets[order].request.tenant_id, []).append(order)
        last_numbers = dict(self.last_numbers)
        granted: list[int] = []
        for number in itertools.count(10**6):  # the grants that are to come
            if not lines:
                return returned + granted
            turns = {
                tenant_id: max(line[0], last_numbers.get(tenant_id, 0))
                for tenant_id, line in lines.items()
            }
            tenant_id = min(turns, key=lambda one: (turns[one], lines[one][0]))
            granted.append(lines[tenant_id].pop(0))
            last_numbers[tenant_id] = number
            if not lines[tenant_id]:
                del lines[tenant_id]
        raise AssertionError("itertools.count does not end")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "grant", "leave", "return"]),
        st.sampled_from("abcd"),
        st.integers(0, 30),
        st.sampled_from(KINDS),
    ),
    max_size=60,
)


class Compared:
    """A queue and a set of turns with the same tickets, and what they must be."""

    def __init__(self) -> None:
        self.line = Line()
        self.turns = Turns(self.line.last_numbers)
        self.queue = FairQueue(last_numbers=self.line.last_numbers)
        self._shown: dict[int, int] = {}

    def add(self, added: Ticket) -> None:
        self.line.tickets[added.order] = added
        self.turns.add(added)
        self.queue.put(added, 0.0)

    def remove(self, order: int) -> None:
        del self.line.tickets[order]
        self.turns.remove(order)
        self.queue.remove(order)
        self._shown.pop(order, None)

    def grant(self, number: int) -> None:
        """Grant the first ticket."""
        first = self.line.tickets[self.line.orders()[0]]
        if not first.request.was_granted:
            tenant_id = first.request.tenant_id
            self.line.last_numbers[tenant_id] = number
            self.turns.renew(tenant_id)
            self.queue.renew(tenant_id)
        self.remove(first.order)

    def check(self) -> None:
        orders = self.line.orders()
        assert list(self.turns) == orders
        assert [self.turns.rank(one) for one in orders] == list(range(len(orders)))
        assert all(self.turns[rank] == one for rank, one in enumerate(orders))
        assert [entry.ticket.order for entry in self.queue] == orders
        assert [one.order for one in self.queue.of_kinds(KINDS)] == orders
        for entry in self.queue:
            assert entry.position <= self._shown.get(entry.ticket.order, entry.position)
            self._shown[entry.ticket.order] = entry.position
        moved: dict[int, int] = {}
        while self.queue.has_moved:
            moved |= {one.ticket.order: one.position for one in self.queue.next_moved(4)}
        assert all(self._shown[one] == position for one, position in moved.items())


@given(STEPS)
def test_order_is_that_of_grants_one_after_the_other(
    steps: list[tuple[str, str, int, lease_pb2.SessionKind]],
) -> None:
    compared = Compared()
    for order, (step, tenant_id, index, kind) in enumerate(steps, 1):
        waiting = list(compared.line.tickets)
        match step:
            case "join":
                compared.add(ticket(order, tenant_id, kind))
            case "return":
                compared.add(ticket(order, tenant_id, kind, was_granted=True))
            case "grant" if waiting:
                compared.grant(order)
            case "leave" if waiting:
                compared.remove(waiting[index % len(waiting)])
            case _:
                pass
        compared.check()


@given(STEPS, st.sets(st.sampled_from(KINDS)))
def test_some_kinds_are_in_the_order_that_they_have_alone(
    steps: list[tuple[str, str, int, lease_pb2.SessionKind]], kinds: set[lease_pb2.SessionKind]
) -> None:
    last_numbers = {"a": 7, "b": 20}
    parts = {kind: Turns(last_numbers) for kind in KINDS}
    together = Turns(last_numbers)
    for order, (step, tenant_id, _, kind) in enumerate(steps, 1):
        one = ticket(order, tenant_id, kind, was_granted=step == "return")
        parts[kind].add(one)
        if kind in kinds:
            together.add(one)
    assert list(merged([parts[kind] for kind in kinds])) == list(together)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=40))
def test_while_a_ticket_is_first_in_its_line_each_other_tenant_is_granted_once(
    arrivals: list[tuple[str, int]],
) -> None:
    last_numbers: dict[str, int] = {}
    turns = Turns(last_numbers)
    waiting: dict[int, str] = {}
    passed: dict[int, Counter[str]] = {}  # grants of other tenants, by the first order of a line
    now = itertools.count(1)

    def grant() -> None:
        order = turns[0]
        tenant_id = waiting.pop(order)
        turns.remove(order)
        last_numbers[tenant_id] = next(now)
        turns.renew(tenant_id)
        assert not [one for one, other in waiting.items() if other == tenant_id and one < order]
        firsts = {one: min(o for o, t in waiting.items() if t == one) for one in waiting.values()}
        for other, first in firsts.items():
            if other != tenant_id:
                count = passed.setdefault(first, Counter())
                count[tenant_id] += 1
                assert count[tenant_id] <= 1

    for tenant_id, grant_count in arrivals:
        order = next(now)
        waiting[order] = tenant_id
        turns.add(ticket(order, tenant_id))
        for _ in range(min(grant_count, len(waiting))):
            grant()
    while waiting:  # every ticket is granted
        grant()


@given(st.lists(st.integers(1, 1000), unique=True))
def test_one_tenant_has_the_order_of_arrival(orders: list[int]) -> None:
    turns = Turns({"": 500})
    for order in orders:
        turns.add(ticket(order, ""))
    assert list(turns) == sorted(orders)


def test_newcomer_is_next_after_the_backlog_of_another_had_its_turn() -> None:
    turns = Turns({"busy": 1500})
    for order in range(1, 1001):
        turns.add(ticket(order, "busy"))
    turns.add(ticket(1501, "new"))
    turns.add(ticket(1502, "new"))
    assert list(itertools.islice(turns, 4)) == [1, 1501, 2, 1502]
