"""Placement: which ticket is next, and which slot it gets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from support.scheduler.scheduler_harness import (
    AUDIO,
    BROKEN,
    CHAT,
    CLEANING,
    FREE,
    OCCUPIED,
    OMNI,
    register_message,
    slot_reports,
)

from duplane.fabric.durations import to_duration
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.policy.fair_queue import AVOIDED_S, FairQueue
from duplane.scheduler.policy.needs import NO_NEEDS, Needs
from duplane.scheduler.policy.placement import Candidate, SlotIndex, avoidance_end, next_grant
from duplane.scheduler.store.base import DrainRequest, Grant, Ticket, Worker

GRANTED_AT = {"": 0.0}  # keys are lease ids; the grants of these tests have no lease id


def ticket(
    order: int, kind: lease_pb2.SessionKind = AUDIO, avoided: tuple[str, ...] = ()
) -> Ticket:
    request = lease_pb2.AcquireLeaseRequest(
        request_id=f"request-{order}", kind=kind, avoided_worker_ids=avoided
    )
    return Ticket(order, f"owner-{order}", request)


def worker(worker_id: str = "w", *states: registry_pb2.SlotState, **facts: Any) -> Worker:
    register = register_message(worker_id, slots=slot_reports(*states or (FREE,)))
    return replace(Worker.of(1, register), **facts)


def grant(slot: int, fencing_number: int) -> Grant:
    return Grant(lease_pb2.LeaseClaims(slot=slot, fencing_number=fencing_number))


def candidate(one: Worker, *granted: int) -> Candidate:
    return Candidate.of(one, {slot: grant(slot, 10 + slot) for slot in granted}, {}, GRANTED_AT)


def granted_slots(tickets: list[Ticket], *candidates: Candidate) -> list[tuple[int, str, int]]:
    """Make all possible grants; return (order of the ticket, worker, slot) of each."""
    queue = FairQueue()
    slots = SlotIndex()
    for one in tickets:
        queue.put(one, 0.0)
    for one in candidates:
        slots.put(one)
    grants: dict[str, dict[int, Grant]] = {}
    for one in candidates:
        states = one.worker.slots
        held = {report.slot for report in states if report.state == FREE} - set(one.free_slots)
        is_open = one.worker.takes_sessions
        grants[one.worker.worker_id] = {slot: grant(slot, 10 + slot) for slot in held if is_open}
    made: list[tuple[int, str, int]] = []
    while found := next_grant(queue, slots, 0.0):
        next_ticket, chosen = found
        slot = chosen.free_slots[0]
        held_slots = grants[chosen.worker.worker_id]
        made.append((next_ticket.order, chosen.worker.worker_id, slot))
        held_slots[slot] = grant(slot, 1000 + len(made))
        queue.remove(next_ticket.order)
        slots.put(Candidate.of(chosen.worker, held_slots, {}, GRANTED_AT))
    return made


def test_first_tickets_get_the_free_slots() -> None:
    tickets = [ticket(order) for order in (3, 5, 9)]
    assert granted_slots(tickets, candidate(worker("w", FREE, FREE))) == [(3, "w", 0), (5, "w", 1)]


def test_worker_with_the_most_free_slots_is_chosen() -> None:
    busy, idle = worker("busy", FREE, FREE), worker("idle", FREE, FREE)
    assert granted_slots([ticket(1)], candidate(busy, 0), candidate(idle)) == [(1, "idle", 0)]


def test_longest_unused_is_chosen_among_equals() -> None:
    late, early = worker("late", FREE), worker("early", FREE)
    late.slots[0].fencing_number = 9
    early.slots[0].fencing_number = 4
    assert granted_slots([ticket(1)], candidate(late), candidate(early)) == [(1, "early", 0)]


def test_longest_unused_slot_of_a_worker_is_chosen() -> None:
    one = worker("w", FREE, FREE)
    one.slots[0].fencing_number = 5
    assert granted_slots([ticket(1)], candidate(one)) == [(1, "w", 1)]


@pytest.mark.parametrize("state", [OCCUPIED, CLEANING, BROKEN])
def test_only_free_slots_are_granted(state: registry_pb2.SlotState) -> None:
    assert granted_slots([ticket(1), ticket(2)], candidate(worker("w", state, FREE))) == [
        (1, "w", 1)
    ]


@pytest.mark.parametrize(
    "facts",
    [
        {"is_draining": True},
        {"drain_request": DrainRequest.DRAIN},
        {"drain_request": DrainRequest.STOP},
        {"is_draining": True, "drain_request": DrainRequest.UNDRAIN},
        {"is_silent": True},
        {"is_unreachable": True},
    ],
)
def test_worker_that_takes_no_sessions_is_passed_over(facts: dict[str, Any]) -> None:
    assert granted_slots([ticket(1)], candidate(worker("w", FREE, **facts))) == []


def test_worker_whose_drain_was_taken_back_gets_sessions() -> None:
    undrained = worker("w", FREE, drain_request=DrainRequest.UNDRAIN)
    assert granted_slots([ticket(1)], candidate(undrained)) == [(1, "w", 0)]


def test_granted_slot_is_not_granted_twice() -> None:
    assert granted_slots([ticket(1)], candidate(worker("w", FREE), 0)) == []


def test_withheld_slot_is_not_granted_and_counts_in_no_forecast() -> None:
    one = worker("w", FREE, FREE)
    one.slots[0].is_withheld = True
    assert granted_slots([ticket(1), ticket(2)], candidate(one)) == [(1, "w", 1)]
    assert candidate(one).idle_count == 1
    one.slots[0].is_withheld = False
    assert candidate(one).idle_count == 2


def test_slot_that_was_granted_before_it_was_withheld_stays_granted() -> None:
    one = worker("w", FREE)
    one.slots[0].is_withheld = True
    assert [slot for slot, _, _ in candidate(one, 0).held] == [0]


def test_slot_of_a_void_grant_is_free_once_the_worker_reports_its_number() -> None:
    one = worker("w", FREE, FREE)
    assert Candidate.of(one, {}, {0: 7}, {}).free_slots == (1,)
    one.slots[0].fencing_number = 7
    assert set(Candidate.of(one, {}, {0: 7}, {}).free_slots) == {0, 1}


def test_no_ticket_is_granted_before_a_head_that_will_be_served() -> None:
    audio, chat = worker("audio", OCCUPIED), worker("chat", FREE)
    chat.register.kinds[:] = [CHAT]
    tickets = [ticket(1, AUDIO), ticket(2, CHAT)]
    assert granted_slots(tickets, candidate(audio), candidate(chat)) == []


@pytest.mark.parametrize(
    "unable",
    [worker("omni", FREE, is_draining=True), worker("omni", BROKEN)],
    ids=["draining", "broken"],
)
def test_head_that_no_worker_can_serve_is_passed_over(unable: Worker) -> None:
    unable.register.kinds[:] = [OMNI]
    tickets = [ticket(1, OMNI), ticket(2, AUDIO)]
    assert granted_slots(tickets, candidate(unable), candidate(worker("w"))) == [(2, "w", 0)]


def test_head_that_only_a_silent_worker_serves_is_waited_for() -> None:
    omni = worker("omni", FREE, is_silent=True)
    omni.register.kinds[:] = [OMNI]
    tickets = [ticket(1, OMNI), ticket(2, AUDIO)]
    assert granted_slots(tickets, candidate(omni), candidate(worker("w"))) == []


def test_draining_workers_count_as_attached_but_not_as_able() -> None:
    def kinds(slots: SlotIndex) -> tuple[Collection[int], Collection[int]]:
        return set(slots.attached_kinds(NO_NEEDS)), set(slots.able_kinds(NO_NEEDS))

    slots = SlotIndex()
    slots.put(candidate(worker("w", FREE, is_draining=True)))
    assert (kinds(slots)) == (
        {AUDIO},
        set(),
    )
    slots.put(candidate(worker("w", FREE)))
    assert (kinds(slots)) == (
        {AUDIO},
        {AUDIO},
    )
    slots.remove("w")
    assert (kinds(slots)) == (set(), set())


def test_worker_attached_first_is_chosen_among_new_ones() -> None:
    first, second = worker("b"), worker("a")
    second = replace(second, epoch=2)
    assert granted_slots([ticket(1)], candidate(second), candidate(first)) == [(1, "b", 0)]


def test_avoided_worker_is_granted_to_the_next_ticket() -> None:
    free = worker("free", FREE, FREE)
    busy = worker("busy", OCCUPIED)
    tickets = [ticket(1, avoided=("free",)), ticket(2)]
    assert granted_slots(tickets, candidate(free), candidate(busy)) == [(2, "free", 0)]


@pytest.mark.parametrize("given_s", [None, 0.0, 2.0])
def test_avoided_worker_is_granted_when_the_time_to_avoid_it_is_over(given_s: float | None) -> None:
    queue = FairQueue()
    slots = SlotIndex()
    avoiding = ticket(1, avoided=("free",))
    if given_s is not None:
        avoiding.request.avoided_duration.CopyFrom(to_duration(given_s))
    slots.put(candidate(worker("free")))
    slots.put(candidate(worker("busy", OCCUPIED)))
    queue.put(avoiding, 100.0)
    end = 100.0 + (AVOIDED_S if given_s is None else given_s)
    if end > 100.0:
        assert next_grant(queue, slots, end - 0.1) is None
        assert avoidance_end(queue, slots, end - 0.1) == end
    found = next_grant(queue, slots, end)
    assert found
    assert found[1].worker.worker_id == "free"
    assert avoidance_end(queue, slots, end) is None


@pytest.mark.parametrize(
    ("incarnations", "is_avoided"),
    [((), True), (("",), True), (("free/1",), True), (("free/0",), False)],
)
def test_worker_that_was_restarted_is_not_avoided(
    incarnations: tuple[str, ...], is_avoided: bool
) -> None:
    queue = FairQueue()
    slots = SlotIndex()
    avoiding = ticket(1, avoided=("free",))
    avoiding.request.avoided_worker_incarnations.extend(incarnations)
    queue.put(avoiding, 0.0)
    attached_again = replace(worker("free"), epoch=7)  # the same process, at another scheduler
    slots.put(candidate(attached_again))
    slots.put(candidate(worker("busy", OCCUPIED)))
    assert (next_grant(queue, slots, 0.1) is None) == is_avoided


def test_avoided_worker_is_used_last_when_the_time_to_avoid_it_is_over() -> None:
    queue = FairQueue()
    slots = SlotIndex()
    queue.put(ticket(1, avoided=("many",)), 0.0)
    slots.put(candidate(worker("many", FREE, FREE)))
    slots.put(candidate(worker("few")))
    found = next_grant(queue, slots, AVOIDED_S)
    assert found
    assert found[1].worker.worker_id == "few"


def test_ticket_that_returns_says_anew_what_it_avoids() -> None:
    queue = FairQueue()
    slots = SlotIndex()
    slots.put(candidate(worker("free")))
    slots.put(candidate(worker("busy", OCCUPIED)))
    queue.put(ticket(1, avoided=("free",)), 0.0)
    queue.put(ticket(1, avoided=("free",)), 10.0)
    assert avoidance_end(queue, slots, 10.0) == 10.0 + AVOIDED_S
    queue.put(ticket(1), 11.0)
    assert next_grant(queue, slots, 11.0)


@pytest.mark.parametrize(
    "other",
    [worker("other", BROKEN), worker("other", is_silent=True), worker("other", is_draining=True)],
    ids=["broken", "silent", "draining"],
)
def test_avoided_worker_is_granted_if_no_other_takes_sessions(other: Worker) -> None:
    avoided = ticket(1, avoided=("free", "gone"))
    assert granted_slots([avoided], candidate(worker("free")), candidate(other)) == [(1, "free", 0)]


def test_worker_that_is_not_avoided_is_chosen_even_with_fewer_free_slots() -> None:
    many = worker("many", FREE, FREE, FREE)
    few = worker("few", FREE)
    avoiding = ticket(1, avoided=("many",))
    assert granted_slots([avoiding], candidate(many), candidate(few)) == [(1, "few", 0)]


def labelled(worker_id: str, **labels: str) -> Worker:
    one = worker(worker_id)
    one.register.labels.update(labels)
    return one


def test_only_a_worker_with_the_needed_labels_is_granted() -> None:
    queue = FairQueue(Needs(frozenset({("model", "a"), ("zone", "x")})))
    slots = SlotIndex()
    queue.put(ticket(1), 0.0)
    for one in (labelled("w1"), labelled("w2", model="a"), labelled("w3", model="b", zone="x")):
        slots.put(candidate(one))
    assert next_grant(queue, slots, 0.0) is None
    slots.put(candidate(labelled("w4", model="a", zone="x", device="cuda")))
    found = next_grant(queue, slots, 0.0)
    assert found
    assert found[1].worker.worker_id == "w4"


def test_worker_that_registers_with_other_labels_moves_to_their_group() -> None:
    slots = SlotIndex()
    slots.put(candidate(labelled("w", model="a")))
    slots.put(candidate(labelled("w", model="b")))
    assert not slots.attached_kinds(Needs(frozenset({("model", "a")})))
    assert slots.attached_kinds(Needs(frozenset({("model", "b")})))
    assert len(slots) == 1


def test_avoided_worker_is_granted_if_no_other_has_the_needed_labels() -> None:
    queue = FairQueue(Needs(frozenset({("model", "a")})))
    slots = SlotIndex()
    queue.put(ticket(1, avoided=("w1",)), 0.0)
    slots.put(candidate(labelled("w1", model="a")))
    slots.put(candidate(labelled("w2", model="b")))
    found = next_grant(queue, slots, 0.0)
    assert found
    assert found[1].worker.worker_id == "w1"
