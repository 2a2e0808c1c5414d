"""Whose turn it is, which slot they get, and what reports mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import (
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

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.policy import (
    Candidate,
    Queue,
    Verdict,
    assign,
    is_served,
    judge,
)
from duplane.scheduler.store.base import Grant, Ticket, Wish, Worker


def ticket(order: int, kind: lease_pb2.SessionKind = AUDIO) -> Ticket:
    return Ticket(order, Wish(f"request-{order}", f"owner-{order}", kind))


def worker(worker_id: str = "w", *states: registry_pb2.SlotState, **facts: bool) -> Worker:
    register = register_message(worker_id, slots=slot_reports(*states or (FREE,)))
    return Worker(1, register, **{"is_draining": False, **facts})


def candidate(one: Worker, *granted: int) -> Candidate:
    return Candidate.of(one, {slot: grant(10 + slot, slot) for slot in granted})


def grant(token: int = 10, slot: int = 0, *, is_claimed: bool = False) -> Grant:
    return Grant(token, f"lease-{token}", "w", 1, slot, AUDIO, is_claimed=is_claimed)


def given_to(tickets: list[Ticket], *candidates: Candidate) -> list[tuple[int, str, int]]:
    return [
        (due.ticket.order, due.worker.worker_id, due.slot) for due in assign(tickets, candidates)
    ]


def test_first_in_line_get_the_free_slots() -> None:
    tickets = [ticket(order) for order in (3, 5, 9)]
    assert given_to(tickets, candidate(worker("w", FREE, FREE))) == [(3, "w", 0), (5, "w", 1)]


def test_worker_with_most_free_slots_is_chosen() -> None:
    busy, idle = worker("busy", FREE, FREE), worker("idle", FREE, FREE)
    assert given_to([ticket(1)], candidate(busy, 0), candidate(idle)) == [(1, "idle", 0)]


def test_longest_unused_is_chosen_among_equals() -> None:
    late, early = worker("late", FREE), worker("early", FREE)
    late.register.slots[0].fencing_number, early.register.slots[0].fencing_number = 9, 4
    assert given_to([ticket(1)], candidate(late), candidate(early)) == [(1, "early", 0)]


def test_longest_unused_slot_of_a_worker_is_chosen() -> None:
    one = worker("w", FREE, FREE)
    one.register.slots[0].fencing_number = 5
    assert given_to([ticket(1)], candidate(one)) == [(1, "w", 1)]


@pytest.mark.parametrize("state", [OCCUPIED, CLEANING, BROKEN])
def test_only_free_slots_are_given(state: registry_pb2.SlotState) -> None:
    assert given_to([ticket(1), ticket(2)], candidate(worker("w", state, FREE))) == [(1, "w", 1)]


@pytest.mark.parametrize("fact", ["is_draining", "is_drain_wanted", "is_silent"])
def test_worker_that_takes_no_sessions_is_passed_over(fact: str) -> None:
    assert given_to([ticket(1)], candidate(worker("w", FREE, **{fact: True}))) == []


def test_granted_slot_is_not_given_twice() -> None:
    assert given_to([ticket(1)], candidate(worker("w", FREE), 0)) == []


def test_nobody_overtakes_a_head_that_will_be_served() -> None:
    audio, chat = worker("audio", OCCUPIED), worker("chat", FREE)
    chat.register.kinds[:] = [CHAT]
    tickets = [ticket(1, AUDIO), ticket(2, CHAT)]
    assert given_to(tickets, candidate(audio), candidate(chat)) == []


@pytest.mark.parametrize(
    "hopeless",
    [worker("omni", FREE, is_draining=True), worker("omni", BROKEN)],
    ids=["draining", "broken"],
)
def test_head_that_no_worker_can_serve_holds_up_nobody(hopeless: Worker) -> None:
    hopeless.register.kinds[:] = [OMNI]
    tickets = [ticket(1, OMNI), ticket(2, AUDIO)]
    assert given_to(tickets, candidate(hopeless), candidate(worker("w"))) == [(2, "w", 0)]


def test_silent_worker_may_come_back_so_its_kind_holds_its_place() -> None:
    omni = worker("omni", FREE, is_silent=True)
    omni.register.kinds[:] = [OMNI]
    tickets = [ticket(1, OMNI), ticket(2, AUDIO)]
    assert given_to(tickets, candidate(omni), candidate(worker("w"))) == []


def test_kind_is_served_by_pool() -> None:
    assert is_served([worker("w", FREE, is_draining=True)], "", AUDIO)
    assert not is_served([worker("w")], "elsewhere", AUDIO)
    assert not is_served([worker("w")], "", CHAT)


@given(
    st.lists(
        st.tuples(st.sampled_from(["join", "leave"]), st.integers(0, 30)), min_size=1, max_size=60
    )
)
def test_place_never_grows_and_order_is_kept(steps: list[tuple[str, int]]) -> None:
    queue, shown = Queue(), dict[int, int]()
    for step, order in steps:
        if step == "join":
            queue.put(ticket(order), 0.0)
        elif queue.get(order):
            before = {place.ticket.order: place.position for place in queue}
            moved = {place.ticket.order for place in queue.remove(order)}
            after = {place.ticket.order: place.position for place in queue}
            assert moved == {one for one, position in after.items() if position < before[one]}
            del shown[order]
        places = list(queue)
        assert [place.ticket.order for place in places] == sorted(
            place.ticket.order for place in places
        )
        for index, place in enumerate(places, 1):
            assert 1 <= place.position <= index
            assert place.position <= shown.get(place.ticket.order, place.position)
            shown[place.ticket.order] = place.position


def test_one_who_comes_back_goes_ahead_and_nobody_falls_back() -> None:
    queue = Queue()
    queue.put(ticket(5), 0.0)
    queue.put(ticket(3), 1.0)
    assert [(place.ticket.order, place.position) for place in queue] == [(3, 1), (5, 1)]


UNHEARD, SEEN, OVERTAKEN = 9, 10, 11  # fencing numbers against a grant's 10


@pytest.mark.parametrize(
    ("is_claimed", "state", "lease_id", "number", "verdict"),
    [
        (False, FREE, "", UNHEARD, Verdict.NOTHING),
        (False, OCCUPIED, "lease-9", UNHEARD, Verdict.NOTHING),
        (False, CLEANING, "lease-9", UNHEARD, Verdict.NOTHING),
        (False, BROKEN, "", UNHEARD, Verdict.ENDED),
        (False, OCCUPIED, "lease-10", SEEN, Verdict.CLAIMED),
        (False, CLEANING, "lease-10", SEEN, Verdict.ENDED),  # came and went
        (False, FREE, "", SEEN, Verdict.ENDED),
        (False, OCCUPIED, "lease-11", OVERTAKEN, Verdict.ENDED),
        (True, OCCUPIED, "lease-10", SEEN, Verdict.NOTHING),
        (True, OCCUPIED, "lease-10", OVERTAKEN, Verdict.NOTHING),  # a later number was revoked
        (True, CLEANING, "lease-10", SEEN, Verdict.ENDED),
        (True, FREE, "", SEEN, Verdict.ENDED),
        (True, BROKEN, "", SEEN, Verdict.ENDED),
        (True, OCCUPIED, "lease-11", OVERTAKEN, Verdict.ENDED),
    ],
)
def test_report_is_judged_against_the_grant(
    is_claimed: bool, state: registry_pb2.SlotState, lease_id: str, number: int, verdict: Verdict
) -> None:
    report = registry_pb2.SlotReport(state=state, fencing_number=number, lease_id=lease_id)
    assert judge(grant(is_claimed=is_claimed), report) is verdict


def test_slot_held_by_a_lease_that_nobody_granted_here_is_noticed() -> None:
    held = registry_pb2.SlotReport(state=OCCUPIED, fencing_number=1, lease_id="x")
    assert judge(None, held) is Verdict.UNKNOWN_LEASE
    assert judge(None, registry_pb2.SlotReport(state=CLEANING, lease_id="x")) is Verdict.NOTHING
