"""The grant loop on a memory store, without gRPC calls."""

from __future__ import annotations

import asyncio

import pytest
from support.scheduler_harness import AUDIO, FREE, register_message, slot_reports

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.granting import GrantLoop
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Ticket
from duplane.scheduler.store.memory import MemoryStore


@pytest.mark.parametrize("has_served", [True, False])
async def test_slots_of_a_worker_that_has_served_are_held_back_after_a_start(
    has_served: bool,
) -> None:
    """The worker attaches to another scheduler that uses the same store."""
    state = SchedulerState(lambda: 0.0)
    store = MemoryStore(boot_ms=1)
    grants = GrantLoop(store, state, claim_timeout_s=5.0, resume_grace_s=3.0)
    store.subscribe(state.apply)
    slots = slot_reports(FREE)
    slots[0].fencing_number = 7 if has_served else 0
    await store.register(register_message(slots=slots))
    request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO)
    ticket = await store.enqueue(request, "owner")
    assert isinstance(ticket, Ticket)
    running = asyncio.create_task(grants.run())
    async with asyncio.timeout(5):
        await grants.settled(ticket.order)
    assert (state.entry(ticket) is not None) == has_served
    running.cancel()
