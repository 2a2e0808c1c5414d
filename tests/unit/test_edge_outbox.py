"""What waits for a client that reads slowly."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.outbox import Outbox, OutboxFullError


async def test_events_wait_up_to_the_bound_and_not_a_byte_more() -> None:
    outbox = Outbox(100)
    outbox.put([b"x" * 60])
    outbox.put([b"x" * 40])
    with pytest.raises(OutboxFullError):
        outbox.put([b"x"])


async def test_one_event_may_be_longer_than_the_bound() -> None:
    outbox = Outbox(100)
    outbox.put([b"x" * 200])
    with pytest.raises(OutboxFullError):
        outbox.put([b"x"])


async def test_an_event_is_held_until_it_was_sent() -> None:
    outbox = Outbox(100)
    outbox.put([b"x" * 100])
    events = outbox.events()
    await anext(events)
    with pytest.raises(OutboxFullError):
        outbox.put([b"x"])
    outbox.finish()
    assert [event async for event in events] == []
    outbox.put([b"x" * 100])


@given(st.lists(st.lists(st.integers(0, 60), max_size=3), max_size=20))
def test_nothing_is_lost_or_out_of_order(batches: list[list[int]]) -> None:
    async def run() -> None:
        outbox, taken = Outbox(150), list[bytes]()
        for number, sizes in enumerate(batches):
            events = [bytes([number]) * size for size in sizes]
            try:
                outbox.put(events)
            except OutboxFullError:
                continue
            taken += events
        outbox.finish()
        assert [event async for event in outbox.events()] == taken

    asyncio.run(run())
