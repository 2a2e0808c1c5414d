"""Operations that wait at the same time share a transaction of etcd."""

from __future__ import annotations

import asyncio

import pytest
from support.scheduler.racing_stores import Pair, settled


async def test_operations_that_are_ready_together_share_a_transaction(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker(slot_count=4)
    tickets = [await one.ticket(f"r{number}") for number in range(4)]
    one.etcd.sent_count = 0
    grants = await asyncio.gather(
        *(one.grant(ticket, worker, slot) for slot, ticket in enumerate(tickets))
    )
    assert one.etcd.sent_count == 1
    await settled(pair)
    assert {grant.claims.slot for grant in grants if grant} == {0, 1, 2, 3}
    assert len(other.facts.granted) == 4


async def test_operation_that_fails_leaves_the_others_of_its_transaction_alone(pair: Pair) -> None:
    one, other = pair
    worker = await one.worker(slot_count=2)
    gone, ticket = await one.ticket("gone"), await one.ticket("r")
    await settled(pair)
    one.etcd.before_next = lambda: other.store.cancel(gone.order)
    refused, grant = await asyncio.gather(one.grant(gone, worker, 0), one.grant(ticket, worker, 1))
    assert refused is None
    assert grant
    await settled(pair)
    assert list(other.facts.granted) == ["r"]


async def test_operations_on_one_key_do_not_share_a_transaction(pair: Pair) -> None:
    one, _ = pair
    worker = await one.worker()
    first, second = await one.ticket("first"), await one.ticket("second")
    grants = await asyncio.gather(one.grant(first, worker), one.grant(second, worker))
    # Either of the two concurrent requests may get the grant.
    assert len([grant for grant in grants if grant]) == 1
    await settled(pair)
    assert len(one.facts.granted) == 1
    assert len(one.facts.tickets) == 1


async def test_arrivals_at_the_same_time_have_different_orders(pair: Pair) -> None:
    one, _ = pair
    tickets = await asyncio.gather(*(one.ticket(f"r{number}") for number in range(40)))
    assert len(one.facts.tickets) == 40
    assert {ticket.order for ticket in tickets} == set(one.facts.tickets)


@pytest.mark.parametrize("lost", ["executed", "executed later"])
async def test_lost_answer_to_several_operations_changes_nothing(pair: Pair, lost: str) -> None:
    one, other = pair
    worker = await one.worker(slot_count=2)
    tickets = [await one.ticket("a"), await one.ticket("b")]
    await settled(pair)
    one.etcd.next_fault = lost
    grants = await asyncio.gather(
        *(one.grant(ticket, worker, slot) for slot, ticket in enumerate(tickets))
    )
    assert all(grants)
    if lost == "executed later":
        assert await one.etcd.execute_late() == [False]
    await settled(pair)
    assert len(other.facts.granted) == 2
