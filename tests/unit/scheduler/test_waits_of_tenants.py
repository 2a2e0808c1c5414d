"""A tenant with a long backlog delays the other tenants by one grant each."""

from __future__ import annotations

from collections import Counter

from support.scheduler.scheduler_harness import AUDIO, register_message

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Grant, Offer, Ticket
from duplane.scheduler.store.memory import MemoryStore

TENANTS = ("busy", "b", "c", "d", "e", "f", "g", "h", "i")  # and tickets without a tenant
BACKLOG = 1000


class Fabric:
    """A store, its state, and a worker of one slot, whose sessions the test ends."""

    def __init__(self) -> None:
        self.store = MemoryStore(1)
        self.state = SchedulerState(lambda: 0.0)
        self.store.subscribe(self.state.apply)

    async def wait(self, tenant_id: str, name: str) -> Ticket:
        request = lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO, tenant_id=tenant_id)
        ticket = await self.store.enqueue(request, name)
        assert isinstance(ticket, Ticket)
        return ticket

    async def next_session(self) -> Grant:
        """Grant the only slot, and end the session."""
        proposal = self.state.next_grant("")
        assert proposal
        ticket, candidate = proposal
        claims = lease_pb2.LeaseClaims(
            lease_id=ticket.request.request_id,
            worker_id=candidate.worker.worker_id,
            worker_epoch=candidate.worker.epoch,
            kind=AUDIO,
        )
        grant = await self.store.try_grant(ticket, Offer(claims, 60.0))
        assert grant
        await self.store.release(grant)
        return grant


async def test_backlog_of_1000_in_a_queue_of_10000_passes_a_newcomer_once() -> None:
    fabric = Fabric()
    await fabric.store.register(register_message())
    for tenant_id in ("", *TENANTS):
        for number in range(BACKLOG):
            await fabric.wait(tenant_id, f"{tenant_id}{number}")
    for _ in range(25):  # the tenants have had different numbers of turns
        await fabric.next_session()
    passed: Counter[str] = Counter()
    newcomer = await fabric.wait("new", "new")
    entry = fabric.state.entry(newcomer)
    assert entry
    assert entry.position == len(TENANTS) + 2
    while True:
        grant = await fabric.next_session()
        assert grant.ticket
        if grant.ticket == newcomer:
            break
        passed[grant.ticket.request.tenant_id] += 1
    assert passed == Counter(["", *TENANTS])


async def test_estimated_wait_follows_the_turns() -> None:
    fabric = Fabric()
    for number in range(50):
        await fabric.wait("busy", f"busy{number}")
    last = await fabric.wait("busy", "last")
    newcomer = await fabric.wait("new", "new")
    await fabric.store.register(register_message())
    hold_s = fabric.state.hold_times.expected_s(AUDIO)
    assert fabric.state.wait_s(newcomer) == hold_s
    assert fabric.state.wait_s(last) == 51 * hold_s
