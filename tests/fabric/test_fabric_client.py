"""FabricClient towards a real scheduler: a wish that is given up leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from scheduler_world import AUDIO, BOUND_S, World

from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2, lease_pb2


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_wish_given_up_around_its_grant_holds_no_slot(turns: int) -> None:
    """`turns` of the event loop pass between the grant being possible and the caller's end."""
    async with World.running(claim_timeout_s=60.0) as world:
        operator = await world.operator()
        worker = await world.worker()
        holder = await (await world.caller()).granted()
        is_queued = asyncio.Event()

        async def on_queued(_: lease_pb2.Queued) -> None:
            is_queued.set()

        async with FabricClient([world.address]) as client:
            wish = lease_pb2.AcquireLeaseRequest(request_id="wish", kind=AUDIO)
            acquiring = asyncio.create_task(client.acquire(wish, on_queued))
            await is_queued.wait()
            releasing = asyncio.create_task(world.release(holder.lease_id))
            for _ in range(turns):
                await asyncio.sleep(0)
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                granted = await acquiring
                await client.release(granted.lease_id)
            await releasing
            await operator.until(lambda seen: not seen.leases and not seen.tickets)
        await worker.vanish()


async def test_operators_are_answered_by_the_next_scheduler_when_one_is_gone() -> None:
    async with World.running() as gone:
        pass
    async with World.running(ticket_limit=7) as world:
        async with FabricClient([gone.address, world.address]) as client:
            told = await client.administer(
                lambda admin: admin.ListTickets(admin_pb2.ListTicketsRequest(), timeout=BOUND_S)
            )
            assert told.ticket_limit == 7
            wanted = admin_pb2.CancelTicketRequest(ticket_id="q_0000000000000001")
            with pytest.raises(FabricError) as refused:
                await client.administer(lambda admin: admin.CancelTicket(wanted, timeout=BOUND_S))
            assert refused.value.reason is Reason.UNKNOWN_TICKET
        async with FabricClient([gone.address]) as client:
            with pytest.raises(FabricError) as silent:
                await client.administer(
                    lambda admin: admin.ListTickets(admin_pb2.ListTicketsRequest(), timeout=BOUND_S)
                )
            assert silent.value.reason is Reason.UNAVAILABLE
