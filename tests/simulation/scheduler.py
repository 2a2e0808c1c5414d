"""One run of a scheduler process in a simulated fabric: its real parts without sockets."""

from __future__ import annotations

import asyncio
from typing import cast

from simulation.checks import Laws
from simulation.etcd import SimulatedClient
from simulation.network import Call

from duplane.fabric.errors import FabricError
from duplane.fabric.lease_signing import LeaseSigner
from duplane.fabric.monitoring.spans import Telemetry
from duplane.scheduler.availability import Availability
from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.etcd.url import DEFAULT_PREFIX
from duplane.scheduler.granting import GrantLoop
from duplane.scheduler.metrics import SchedulerMetrics
from duplane.scheduler.position_updates import PositionUpdates
from duplane.scheduler.quotas import Quotas
from duplane.scheduler.rpc.leases import LeaseServicer
from duplane.scheduler.rpc.registry import RegistryServicer
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.signing import LeaseKeys
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import LeaseStore
from duplane.scheduler.store.etcd.store import EtcdStore
from duplane.scheduler.store.memory import MemoryStore
from duplane.scheduler.waiters import Waiters
from duplane.scheduler.watch import Watch

SETTINGS = SchedulerSettings()
_telemetry = Telemetry("scheduler")
_signer = LeaseSigner()


def open_store(client: SimulatedClient | None, boot_ms: int) -> LeaseStore:
    """Open a store on a simulated etcd, or in memory."""
    clock = asyncio.get_running_loop().time
    if client is None:
        return MemoryStore(boot_ms, clock)
    return EtcdStore(cast(EtcdClient, client), DEFAULT_PREFIX, boot_ms, clock)


class Unmeasured:
    """Takes the place of the metrics, which would only cost time here."""

    def refused(self, error: FabricError) -> None:
        """Count nothing."""


class Scheduler:
    """The parts of the process. `client` is None if the leases are in memory."""

    def __init__(
        self,
        client: SimulatedClient | None,
        boot_ms: int,
        laws: Laws,
        key_age_s: float | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.client = client
        # A dict, because a dict keeps the order in which calls start.
        self.calls: dict[Call, None] = {}
        self.store = open_store(client, boot_ms)
        self.state = SchedulerState(clock)
        signer = _signer if key_age_s is None else LeaseSigner()
        self.keys = LeaseKeys(self.store, signer, key_age_s)
        grants = GrantLoop(
            self.store, self.state, SETTINGS.claim_timeout_s, SETTINGS.resume_grace_s
        )
        limit = SETTINGS.ticket_limit
        self.quotas = Quotas(self.store, self.state, limit, clock)
        self.waiters = Waiters(
            self.store, self.state, limit, self.quotas, grants.enqueue, grants.may_return
        )
        positions = PositionUpdates(self.state)
        self.leases = LeaseServicer(
            SETTINGS,
            self.store,
            self.state,
            self.waiters,
            grants,
            self.keys,
            _telemetry,
            cast(SchedulerMetrics, Unmeasured()),
        )
        self.watch = Watch(self.state, SETTINGS.ticket_limit)
        self.registry = RegistryServicer(SETTINGS, self.store, self.state, self.watch)
        laws.scheduler_began(self.state, is_alone=client is None)
        self.availability = Availability(self.store, self.waiters, self.registry, self.watch)
        self.store.subscribe(self.state.apply)
        loops = (self.store, grants, positions, self.keys)
        self._loops = [asyncio.create_task(loop.run()) for loop in loops]

    @property
    def failure(self) -> BaseException | None:
        """The error that ended one of the loops, or None."""
        ended = (loop for loop in self._loops if loop.done() and not loop.cancelled())
        return next((loop.exception() for loop in ended), None)

    async def kill(self) -> None:
        """End the process immediately.

        The store is stopped first, so that the process cleans up nothing in it.
        """
        for loop in self._loops:
            loop.cancel()
        await asyncio.wait(self._loops)
        for call in list(self.calls):
            call.end()
