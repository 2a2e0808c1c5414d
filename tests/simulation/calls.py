"""Calls to simulated schedulers on virtual time.

Calls and connections fail only if a test breaks them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from simulation.checks import Laws
from simulation.etcd import SimulatedClient, SimulatedEtcd, simulated_etcd
from simulation.network import Call, CallError
from simulation.scheduler import Scheduler
from simulation.virtual_time import run
from support.scheduler.scheduler_harness import AUDIO, register_message

from duplane.fabric.v1 import lease_pb2, registry_pb2

_BOOT_MS = 1_700_000_000_000


class Chance(random.Random):
    """Random numbers that cause no fault: no message is lost, and each has the shortest delay."""

    def random(self) -> float:
        return 0.5

    def uniform(self, a: float, b: float) -> float:
        return a


class Schedulers:
    """Schedulers on one etcd, and calls to them.

    With `key_age_s` the schedulers replace their signing keys.
    """

    def __init__(self, count: int, key_age_s: float | None) -> None:
        self.etcd = SimulatedEtcd()
        self.clients = [SimulatedClient(self.etcd, Chance()) for _ in range(count)]
        for client in self.clients:
            client.hang_share = 0.0
        self.schedulers = [
            Scheduler(client, _BOOT_MS, Laws(), key_age_s) for client in self.clients
        ]

    def attach(self, at: int, stream_number: int) -> Call:
        """Attach the worker `w`."""
        scheduler = self.schedulers[at]
        call = Call(Chance())
        call.begin(lambda context: scheduler.registry.Attach(call.requests(), context))
        register = register_message(stream_number=stream_number)
        call.send(registry_pb2.AttachRequest(register=register))
        return call

    def acquire(self, at: int, request_id: str, place: lease_pb2.Queued | None = None) -> Call:
        """Ask for a slot, or return to a place in the queue."""
        request = lease_pb2.AcquireLeaseRequest(request_id=request_id, kind=AUDIO)
        if place:
            request.ticket_id, request.ticket_proof = place.ticket_id, place.ticket_proof
        call = Call(Chance())
        call.begin(lambda context: self.schedulers[at].leases.AcquireLease(request, context))
        return call

    def release(self, at: int, request_id: str) -> Call:
        """Give back the grant of a request."""
        request = lease_pb2.ReleaseLeaseRequest(request_id=request_id)
        call = Call(Chance())

        async def serve(context: Any) -> None:
            await self.schedulers[at].leases.ReleaseLease(request, context)

        call.begin(serve)
        return call

    async def kill(self) -> None:
        """Kill every scheduler."""
        for scheduler in self.schedulers:
            await scheduler.kill()


async def queued(call: Call) -> lease_pb2.Queued:
    """Return the next message, which must be a position in the queue."""
    response = await call.read()
    assert response.HasField("queued"), response
    return response.queued


async def granted(call: Call) -> lease_pb2.Granted:
    """Wait for the grant."""
    while not (response := await call.read()).HasField("granted"):
        pass
    return response.granted


async def code_of(call: Call) -> str:
    """Read a call to its end; return its status."""
    while True:
        try:
            await call.read()
        except CallError as error:
            return error.code


@contextlib.asynccontextmanager
async def schedulers_of(count: int, key_age_s: float | None = None) -> AsyncGenerator[Schedulers]:
    """Run schedulers during the body of the `with`."""
    fabric = Schedulers(count, key_age_s)
    for scheduler in fabric.schedulers:
        await scheduler.store.cancel(0)  # returns as soon as the scheduler has a session
    yield fabric
    await fabric.kill()


def simulated(main: Coroutine[Any, Any, None]) -> None:
    """Run a test on virtual time, with the simulated etcd."""
    with simulated_etcd():
        run(main)
