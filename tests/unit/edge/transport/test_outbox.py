"""The queue of events for a client that reads slowly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.transport.outbox import Outbox, OutboxFullError


def test_events_wait_up_to_the_bound_and_not_a_byte_more() -> None:
    outbox = Outbox(100)
    outbox.put([b"x" * 60])
    outbox.put([b"x" * 40])
    with pytest.raises(OutboxFullError):
        outbox.put([b"x"])


def test_one_event_may_be_longer_than_the_bound() -> None:
    outbox = Outbox(100)
    outbox.put([b"x" * 200])
    with pytest.raises(OutboxFullError):
        outbox.put([b"x"])


def test_an_event_is_held_until_the_connection_has_taken_it() -> None:
    outbox = Outbox(100)
    outbox.put([b"x" * 100])
    with pytest.raises(OutboxFullError):
        outbox.put([b"x"])
    assert outbox.pop() == (b"x" * 100, None)
    assert not outbox
    outbox.put([b"x" * 100])


def test_the_last_of_some_events_says_that_they_are_written() -> None:
    outbox = Outbox(100)
    calls = list[str]()
    outbox.put([b"one", b"two"], lambda: calls.append("written"))
    assert outbox.pop() == (b"one", None)
    event, on_written = outbox.pop()
    assert event == b"two"
    assert on_written
    on_written()
    assert calls == ["written"]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 60), max_size=3), st.integers(0, 4)), max_size=20)
)
def test_nothing_is_lost_or_out_of_order(batches: list[tuple[list[int], int]]) -> None:
    """Each step puts a batch of events into the queue, and then takes a number of events."""
    outbox = Outbox(150)
    added = list[bytes]()
    taken = list[bytes]()
    for number, (sizes, take_count) in enumerate(batches):
        events = [bytes([number]) * size for size in sizes]
        try:
            outbox.put(events)
        except OutboxFullError:
            pass
        else:
            added += events
        while outbox and take_count:
            taken.append(outbox.pop()[0])
            take_count -= 1
    while outbox:
        taken.append(outbox.pop()[0])
    assert taken == added
