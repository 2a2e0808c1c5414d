"""A store that does not answer for some seconds ends no session that was claimed in time.

The schedulers and etcd are those of the simulation, on virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from simulation.calls import Chance, Schedulers, granted, schedulers_of, simulated
from simulation.network import Call
from simulation.scheduler import SETTINGS
from support.scheduler.scheduler_harness import CLEANING, OCCUPIED, register_message

from duplane.fabric.v1 import lease_pb2, registry_pb2

STALL_S = 8.0  # longer than the claim timeout, shorter than the loss of the contact


class Worker:
    """A worker with two slots that reports at the interval."""

    def __init__(self, fabric: Schedulers) -> None:
        register = register_message(slot_count=2)
        self.slots = list(register.slots)
        self.revoked: list[str] = []
        self._call = Call(Chance())
        registry = fabric.schedulers[0].registry
        self._call.begin(lambda context: registry.Attach(self._call.requests(), context))
        self._call.send(registry_pb2.AttachRequest(register=register))
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._repeat())]

    def claim(self, grant: lease_pb2.Granted) -> None:
        claims = lease_pb2.LeaseClaims.FromString(grant.lease.claims)
        slot = self.slots[claims.slot]
        slot.state, slot.lease_id = OCCUPIED, claims.lease_id
        slot.fencing_number, slot.kind = claims.fencing_number, claims.kind
        self.report()

    def clean(self, slot: int) -> None:
        self.slots[slot].state = CLEANING
        self.slots[slot].lease_id = ""
        self.report()

    def report(self) -> None:
        self._call.send(registry_pb2.AttachRequest(report=registry_pb2.Report(slots=self.slots)))

    async def _read(self) -> None:
        while message := await self._call.read():
            if message.HasField("revoke"):
                slot = self.slots[message.revoke.slot]
                slot.fencing_number = max(slot.fencing_number, message.revoke.fencing_number)
                self.revoked.append(message.revoke.lease_id)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(SETTINGS.report_interval_s)
            self.report()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)
        self._call.cut()


@pytest.mark.parametrize(
    ("granting", "stall_s"),
    [(0, STALL_S), (1, STALL_S), (0, SETTINGS.claim_timeout_s - 0.2)],
    ids=["own grant", "grant of another scheduler", "stall that ends before the deadline"],
)
def test_session_that_claimed_while_the_store_stalled_stays(
    granting: int, stall_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with schedulers_of(2) as fabric:
            worker = Worker(fabric)
            worker.claim(await granted(fabric.acquire(granting, "first")))
            await asyncio.sleep(1)
            second = await granted(fabric.acquire(granting, "second"))
            for client in fabric.clients:
                client.cut(stall_s)
            worker.clean(0)  # this report waits for the store
            await asyncio.sleep(0.1)
            worker.claim(second)  # so this one is not read
            await asyncio.sleep(stall_s + 2 * SETTINGS.claim_timeout_s)
            for scheduler in fabric.schedulers:
                assert scheduler.state.grants[second.lease_id].is_claimed
            assert second.lease_id not in worker.revoked
            await worker.end()

    with caplog.at_level(logging.WARNING):
        simulated(main())
    assert not [one for one in caplog.messages if "sends no reports" in one]


def test_grant_that_is_not_claimed_after_a_stall_ends() -> None:
    async def main() -> None:
        async with schedulers_of(2) as fabric:
            worker = Worker(fabric)
            lost = await granted(fabric.acquire(0, "first"))
            for client in fabric.clients:
                client.cut(STALL_S)
            await asyncio.sleep(STALL_S + SETTINGS.claim_timeout_s + 3)
            assert all(lost.lease_id not in one.state.grants for one in fabric.schedulers)
            assert lost.lease_id in worker.revoked
            await worker.end()

    simulated(main())
