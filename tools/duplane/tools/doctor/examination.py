"""Runs every check for one role."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from duplane.edge import start_check as edge_start
from duplane.edge.settings import EdgeSettings
from duplane.fabric.process import StartError
from duplane.fabric.tls.credentials import FabricCredentials, open_credentials
from duplane.fabric.tls.identity import Role
from duplane.scheduler import start_check as scheduler_start
from duplane.scheduler.key_files import open_signer
from duplane.scheduler.settings import SchedulerSettings
from duplane.tools.doctor import certificates, device, limits, peers
from duplane.tools.doctor.findings import Finding, Level, error, flag_named, ok, warning
from duplane.tools.doctor.limits import Settings
from duplane.worker import start_check as worker_start

START = "start"


async def examine(settings: Settings, grace_s: float | None) -> Sequence[Finding]:
    """Return the findings of every check of a process with these settings."""
    if isinstance(settings, EdgeSettings):
        found = await _edge(settings)
    elif isinstance(settings, SchedulerSettings):
        found = await _scheduler(settings)
    else:
        own = certificates.of_fabric(settings.fabric, Role.WORKER, settings.worker_id)
        found = [await _start(worker_start.check_exposure(settings)), *own]
        found += device.findings(settings)
        credentials = _credentials(settings, Role.WORKER)
        if credentials or not settings.fabric.fabric_tls:
            found += await peers.schedulers(settings.schedulers, credentials)
    return [
        *found,
        limits.open_files(settings),
        limits.clock(),
        limits.time_to_stop(settings, grace_s),
        *limits.contradictions(settings),
    ]


async def _edge(settings: EdgeSettings) -> list[Finding]:
    found = [
        await _start(edge_start.check_start(settings)),
        *certificates.of_fabric(settings.fabric, Role.EDGE),
        *certificates.of_pair(settings.tls_cert, settings.tls_key, "--tls-cert", "--tls-key"),
    ]
    credentials = _credentials(settings, Role.EDGE)
    if credentials or not settings.fabric.fabric_tls:
        called = await peers.schedulers(settings.schedulers, credentials)
        found += called
        if not all(one.level is Level.ERROR for one in called):
            found += await peers.workers(settings, credentials)
    return found


async def _scheduler(settings: SchedulerSettings) -> list[Finding]:
    pair = settings.store_cert, settings.store_key
    found = [
        await _start(scheduler_start.check_start(settings)),
        *certificates.of_fabric(settings.fabric, Role.SCHEDULER),
        *certificates.of_bundle(settings.store_ca, "--store-ca"),
        *certificates.of_pair(*pair, "--store-cert", "--store-key"),
    ]
    try:
        open_signer(settings)
    except ValueError as problem:
        found.append(error(certificates.CHECK, "--signing-key", str(problem)))
    found += [finding async for finding in peers.store(settings)]
    return found


async def _start(check: Awaitable[str]) -> Finding:
    """Return what the process itself would refuse or warn of when it starts."""
    try:
        problem = await check
    except StartError as refusal:
        return error(START, flag_named(str(refusal)), str(refusal))
    if problem:
        return warning(START, flag_named(problem), problem)
    return ok(START, "--listen", "nothing is open that no flag allows")


def _credentials(settings: Settings, role: Role) -> FabricCredentials | None:
    """Return the certificate to call peers with; None if there is none that can be used."""
    try:
        return open_credentials(settings.fabric, role)
    except StartError:
        return None  # the check of the certificates says why
