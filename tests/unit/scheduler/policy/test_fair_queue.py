"""The FIFO queue: its order is kept, and a position that was shown never grows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.scheduler.scheduler_harness import AUDIO, CHAT

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.fair_queue import FairQueue
from duplane.scheduler.store.base import Ticket


def ticket(order: int, kind: lease_pb2.SessionKind = AUDIO) -> Ticket:
    request = lease_pb2.AcquireLeaseRequest(request_id=f"request-{order}", kind=kind)
    return Ticket(order, f"owner-{order}", request)


@given(
    st.lists(
        st.tuples(st.sampled_from(["join", "leave"]), st.integers(0, 30)), min_size=1, max_size=60
    )
)
def test_position_never_grows_and_order_is_kept(steps: list[tuple[str, int]]) -> None:
    queue = FairQueue()
    shown = dict[int, int]()
    for step, order in steps:
        if step == "join":
            queue.put(ticket(order), 0.0)
        elif queue.get(order):
            before = {entry.ticket.order: entry.position for entry in queue}
            queue.remove(order)
            moved: set[int] = set()
            while queue.has_moved:
                moved |= {entry.ticket.order for entry in queue.next_moved(3)}
            after = {entry.ticket.order: entry.position for entry in queue}
            assert moved == {one for one, position in after.items() if position < before[one]}
            del shown[order]
        entries = list(queue)
        assert [entry.ticket.order for entry in entries] == sorted(
            entry.ticket.order for entry in entries
        )
        for index, entry in enumerate(entries, 1):
            assert 1 <= entry.position <= index
            assert entry.position <= shown.get(entry.ticket.order, entry.position)
            shown[entry.ticket.order] = entry.position


def test_returning_ticket_goes_ahead_and_no_position_grows() -> None:
    queue = FairQueue()
    queue.put(ticket(5), 0.0)
    queue.put(ticket(3), 1.0)
    assert [(entry.ticket.order, entry.position) for entry in queue] == [(3, 1), (5, 1)]


def test_tickets_are_found_by_kind() -> None:
    queue = FairQueue()
    for order, kind in ((4, AUDIO), (2, CHAT), (7, CHAT)):
        queue.put(ticket(order, kind), 0.0)
    both = [one.order for one in queue.of_kinds([CHAT, AUDIO])]
    assert both == [2, 4, 7]
    assert [one.order for one in queue.of_kinds([AUDIO])] == [4]
    queue.remove(4)
    assert not list(queue.of_kinds([AUDIO]))


def test_entries_that_moved_are_found_in_portions_also_while_more_leave() -> None:
    queue = FairQueue()
    for order in range(1, 11):
        queue.put(ticket(order), 0.0)
    queue.remove(2)
    assert [(one.ticket.order, one.position) for one in queue.next_moved(3)] == [
        (3, 2),
        (4, 3),
        (5, 4),
    ]
    queue.remove(1)
    seen: dict[int, int] = {}
    while queue.has_moved:
        seen |= {one.ticket.order: one.position for one in queue.next_moved(3)}
    assert seen == {order: order - 2 for order in range(3, 11)}


def test_entry_that_was_read_meanwhile_is_still_returned_as_moved() -> None:
    queue = FairQueue()
    for order in (1, 2):
        queue.put(ticket(order), 0.0)
    queue.remove(1)
    assert [one.position for one in queue] == [1]
    assert [one.ticket.order for one in queue.next_moved(5)] == [2]


def test_front_is_published_first_while_the_rest_is_on_its_way() -> None:
    queue = FairQueue()
    for order in range(1, 101):
        queue.put(ticket(order), 0.0)
    queue.remove(1)
    assert [one.ticket.order for one in queue.next_moved(6)] == [2, 3, 4, 5, 6, 7]
    queue.remove(2)
    assert [one.ticket.order for one in queue.next_moved(6)] == [3, 4, 5, 8, 9, 10]
    seen: dict[int, int] = {}
    while queue.has_moved:
        portion = queue.next_moved(6)
        assert len(portion) <= 6
        seen |= {one.ticket.order: one.position for one in portion}
    assert seen[100] == 98


def test_search_for_moved_entries_is_bounded() -> None:
    queue = FairQueue()
    for order in range(1, 2001):
        queue.put(ticket(order), 0.0)
    list(queue)
    queue.remove(1)
    while queue.has_moved:
        queue.next_moved(50)
    queue.put(ticket(1), 0.0)
    queue.remove(1)  # no ticket has moved up since the last call
    calls = 0
    while queue.has_moved:
        assert not queue.next_moved(50)
        calls += 1
    assert 2000 / 256 <= calls <= 10
