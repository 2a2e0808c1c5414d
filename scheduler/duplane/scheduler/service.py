"""One scheduler process: builds its parts, starts them and stops them.

The store publishes each change to `SchedulerState.apply`, which updates the state and then calls
the listeners of nine parts. A part adds its listener in its constructor. So the listeners run in
the order in which `Scheduler` constructs the parts: slot counts, metrics, watch, grant loop,
quotas, waiters, position updates, reachability checks, registry. Each listener sees the state after
the change. No listener changes the state or relies on an earlier listener.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import NoReturn

from duplane.fabric import process
from duplane.fabric.channel import CallLimits, FabricServer
from duplane.fabric.exposure import warned_hourly
from duplane.fabric.monitoring.certificates import observe_certificates
from duplane.fabric.monitoring.health import reported_health
from duplane.fabric.monitoring.publication import published
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.tls.credentials import open_credentials
from duplane.fabric.tls.identity import Role
from duplane.fabric.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from duplane.fabric.watched_files import WatchedFiles, reload_on_hangup, watch
from duplane.scheduler import wall_clock
from duplane.scheduler.availability import Availability
from duplane.scheduler.granting import GrantLoop
from duplane.scheduler.key_files import StoreCredentials, open_signer
from duplane.scheduler.metrics import SchedulerMetrics
from duplane.scheduler.position_updates import PositionUpdates
from duplane.scheduler.quotas import Quotas, waiting_limit
from duplane.scheduler.reachability import ReachabilityChecks
from duplane.scheduler.rpc.admin import AdminServicer
from duplane.scheduler.rpc.leases import LeaseServicer
from duplane.scheduler.rpc.registry import RegistryServicer
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.signing import LeaseKeys
from duplane.scheduler.start_check import check_start
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.measured import MeasuredStore
from duplane.scheduler.store.opening import open_store
from duplane.scheduler.validation import MAX_REGISTER_BYTES
from duplane.scheduler.waiters import Waiters
from duplane.scheduler.watch import Watch

_log = logging.getLogger(__name__)

# The time limit for the answer to a ping can be long, because missing reports show much earlier
# that a worker hangs. Operators see such a worker as silent until its connection is closed.
_PING_TIMEOUT_S = 30.0
# Calls beside those that wait for a slot: an Attach stream of each of 10,000 workers, releases,
# lists, watches and health checks.
_OTHER_CALLS = 16_384
_OTHER_CALLS_PER_CONNECTION = 2048  # of one edge; a worker has one stream and a health check
# Twice the longest message, a registration, so that one that is a little too long is refused with
# an error that names the field.
_MAX_MESSAGE_BYTES = 2 * MAX_REGISTER_BYTES
_SERVICES = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (lease_pb2, "LeaseService"),
        (registry_pb2, "RegistryService"),
        (admin_pb2, "AdminService"),
    )
)


class Scheduler:
    """The parts of one scheduler and its gRPC server."""

    def __init__(self, settings: SchedulerSettings, telemetry: Telemetry | None = None) -> None:
        self._settings = settings
        self._credentials = open_credentials(settings.fabric, Role.SCHEDULER)
        try:
            signer = open_signer(settings)
            self._store_credentials = StoreCredentials(settings)
        except ValueError as error:
            raise process.StartError(str(error)) from None
        state = SchedulerState(time.monotonic, settings.pools)
        self.metrics = SchedulerMetrics(state)
        credentials = self._credentials
        observe_certificates(
            self.metrics.registry, {"fabric": lambda: credentials.leaf if credentials else None}
        )
        telemetry = telemetry or Telemetry("scheduler")
        telemetry.observe(self.metrics.registry)
        store = open_store(settings.store, wall_clock.now_ms(), self._store_credentials)
        self._store = MeasuredStore(store, self.metrics.registry)
        key_age_s = None if settings.signing_key else settings.signing_key_age_s
        self._keys = LeaseKeys(self._store, signer, key_age_s)
        self._watch = Watch(state, settings.ticket_limit)
        self._grant_loop = GrantLoop(
            self._store, state, settings.claim_timeout_s, settings.resume_grace_s
        )
        tenant_tickets = waiting_limit(settings.ticket_limit, settings.tenant_ticket_share)
        self._quotas = Quotas(self._store, state, tenant_tickets, wall_clock.now_s)
        self.metrics.show_quotas(self._quotas, settings.ticket_limit)
        self._waiters = Waiters(
            self._store,
            state,
            settings.ticket_limit,
            self._quotas,
            self._grant_loop.enqueue,
            self._grant_loop.may_return,
        )
        self._position_updates = PositionUpdates(state)
        self._lost_workers = state.lost_workers
        self._reachability = ReachabilityChecks(
            self._store, state, self._credentials, self._grant_loop.wake
        )
        self._leases = LeaseServicer(
            settings,
            self._store,
            state,
            self._waiters,
            self._grant_loop,
            self._keys,
            telemetry,
            self.metrics,
        )
        self._registry = RegistryServicer(settings, self._store, state, self._watch)
        self._admin = AdminServicer(self._store, state, self._watch)
        self._availability = Availability(self._store, self._waiters, self._registry, self._watch)
        self._store.watch_refusal(self._watch.set_store_refusal)
        self._store.subscribe(state.apply)

    async def start(self, tasks: asyncio.TaskGroup) -> str:
        """Start to serve, start the loops as `tasks`, and return the bound host:port."""
        self._server = FabricServer(
            *_SERVICES,
            ping_timeout_s=_PING_TIMEOUT_S,
            credentials=self._credentials,
            limits=_call_limits(self._settings.ticket_limit),
            max_message_bytes=_MAX_MESSAGE_BYTES,
        )
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(self._leases, self._server.grpc)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(self._registry, self._server.grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, self._server.grpc)
        address = await self._server.start(self._settings.listen)
        self._loops = [
            tasks.create_task(self._store.run()),
            tasks.create_task(self._grant_loop.run()),
            tasks.create_task(self._position_updates.run()),
            tasks.create_task(self._reachability.run()),
            tasks.create_task(self._lost_workers.run()),
            tasks.create_task(self._keys.run()),
            tasks.create_task(self._quotas.run()),
            tasks.create_task(self._report_health()),
            tasks.create_task(watch(self.watched_files)),
        ]
        return address

    @property
    def is_serving(self) -> bool:
        """False while this scheduler refuses calls."""
        return self._availability.is_serving

    @property
    def watched_files(self) -> Sequence[WatchedFiles]:
        """The files that this scheduler reads again when they change."""
        of_fabric = self._credentials.watched_files if self._credentials else ()
        has_store = self._settings.store_ca or self._settings.store_password
        return (self._store_credentials, *of_fabric) if has_store else of_fabric

    async def stop(self) -> None:
        """End every call and the loops. Calls that outlast the time limit are cancelled.

        Waiting callers and workers get UNAVAILABLE, so they call another scheduler. Leases stay
        valid.
        """
        self._availability.stop()
        await self._server.stop(self._settings.stop_timeout_s)
        await self._store.leave()
        for loop in self._loops:
            loop.cancel()

    async def _report_health(self) -> NoReturn:
        """Let the health service report whether this scheduler accepts calls, until cancelled."""
        while True:
            await self._availability.changed.wait()
            self._availability.changed.clear()
            await self._server.set_serving(self._availability.is_serving)


async def serve(settings: SchedulerSettings, shutdown: process.Shutdown) -> None:
    """Run one scheduler until the first signal.

    A scheduler does not drain, because sessions continue without their scheduler.
    """
    warning = await check_start(settings)
    telemetry = Telemetry("scheduler")
    scheduler = Scheduler(settings, telemetry)
    registry = scheduler.metrics.registry
    try:
        async with (
            reported_health("scheduler", settings.health_listen, shutdown) as health,
            warned_hourly(warning),
            published(registry, settings.metrics_listen),
            asyncio.TaskGroup() as tasks,
        ):
            address = await scheduler.start(tasks)
            reload_on_hangup(scheduler.watched_files)
            health.start(accepts=lambda: scheduler.is_serving)
            process.announce("scheduler", address)
            try:
                await shutdown.wait()
            finally:
                await scheduler.stop()
    finally:
        await asyncio.to_thread(telemetry.shutdown)
    _log.info("stopped")


def _call_limits(ticket_limit: int) -> CallLimits:
    """Return how many calls a scheduler runs, so that every ticket of the fabric may wait here.

    Twice as many tickets as `ticket_limit` wait while callers return (see `Waiters`), and one edge
    may have all of them.
    """
    waiting = 2 * ticket_limit
    return CallLimits(waiting + _OTHER_CALLS, waiting + _OTHER_CALLS_PER_CONNECTION)
