"""Calls every peer of a process, with its own certificate, as the process does."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2

from duplane.edge.settings import EdgeSettings
from duplane.fabric.addresses import resolve
from duplane.fabric.channel import health_grpc, open_channel
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.tls.failures import tls_failure
from duplane.fabric.tls.identity import Role
from duplane.scheduler.etcd.client import EtcdClient, EtcdError, FullError, NoAnswerError
from duplane.scheduler.key_files import StoreCredentials
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.store.etcd.keys import Keys
from duplane.scheduler.store.url import parse_url
from duplane.tools.command import CommandError
from duplane.tools.doctor.findings import Finding, Level, error, ok, warning
from duplane.tools.operators.snapshots import merge, read_fabric

Answer = TypeVar("Answer")
CHECK, RIGHTS = "peers", "rights in etcd"
TIMEOUT_S = 5.0  # for one peer, or one thing to do in etcd
_MAX_CALLS = 64  # at the same time
_PAUSE_S = 0.1  # between two attempts at etcd
_LEASE_S = 60  # of the lease that shows whether etcd grants one


async def schedulers(
    addresses: Sequence[str], credentials: FabricCredentials | None
) -> Sequence[Finding]:
    """Call every scheduler; a name stands for all its addresses."""
    return await _all(await resolve(addresses), Role.SCHEDULER, credentials)


async def workers(
    settings: EdgeSettings, credentials: FabricCredentials | None
) -> Sequence[Finding]:
    """Call every worker that the schedulers list for the pool of an edge."""
    try:
        listed = merge(await read_fabric(settings.schedulers, credentials))
    except CommandError as problem:
        return [error(CHECK, "--scheduler", str(problem))]
    found: list[Finding] = []
    if listed.store_refusal:
        found.append(error(CHECK, "--scheduler", f"no session begins: {listed.store_refusal}"))
    addresses = [one.worker.address for one in listed.workers if one.worker.pool == settings.pool]
    if not addresses:
        pool = f"pool {settings.pool!r}" if settings.pool else "pool without a name"
        found.append(warning(CHECK, "--pool", f"the {pool} has no worker: sessions wait"))
    found += await _all(addresses, Role.WORKER, credentials)
    return found


async def _all(
    addresses: Sequence[str],
    role: Role,
    credentials: FabricCredentials | None,
) -> Sequence[Finding]:
    turns = asyncio.Semaphore(_MAX_CALLS)

    async def call(address: str) -> Finding:
        async with turns:
            return await _call(address, role, credentials)

    return await asyncio.gather(*map(call, addresses))


async def _call(address: str, role: Role, credentials: FabricCredentials | None) -> Finding:
    flag = "--scheduler" if role is Role.SCHEDULER else "--advertise"
    name = f"{role} at {address}"
    async with open_channel(address, role, credentials) as channel:
        try:
            answer = await health_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.aio.AioRpcError as failure:
            text = failure.details() or failure.code().name
            has_tls = credentials is not None
            why = tls_failure(text, is_new=True, has_tls=has_tls)
            return error(CHECK, "--fabric-tls" if why else flag, f"{name}: {why or text}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return warning(CHECK, flag, f"{name} answers that it does not serve now")
    return ok(CHECK, flag, f"{name} serves")


async def store(settings: SchedulerSettings) -> AsyncIterator[Finding]:
    """Call every member of etcd, and try whatever a scheduler needs to do in it."""
    cluster = parse_url(settings.store)
    if cluster is None:
        yield ok(CHECK, "--store", "leases are in the memory of this scheduler")
        return
    try:
        credentials = StoreCredentials(settings).current
    except ValueError:
        return  # the check of the certificates names the file
    has_answered = False
    for address in cluster.addresses:
        client = EtcdClient((address,), credentials)
        try:
            found = await _member(client, address, settings)
        finally:
            await client.close()
        has_answered |= found.level is Level.OK
        yield found
    if not has_answered:
        return
    client = EtcdClient(cluster.addresses, credentials)
    try:
        async for finding in _rights(client, cluster.prefix, settings):
            yield finding
    finally:
        await client.close()


async def _member(client: EtcdClient, address: str, settings: SchedulerSettings) -> Finding:
    try:
        alarms = await _patient(client.alarms)
    except NoAnswerError as failure:
        hint = "" if settings.store_ca else "; if it has TLS, give --store-ca"
        return error(CHECK, "--store", f"etcd does not answer: {failure}{hint}")
    except EtcdError as failure:
        return error(CHECK, _login(settings), f"etcd at {address}: {failure.message}")
    if alarms:
        return error(CHECK, "--store", f"etcd at {address} refuses writes: {', '.join(alarms)}")
    return ok(CHECK, "--store", f"etcd at {address} answers")


async def _rights(
    client: EtcdClient, prefix: str, settings: SchedulerSettings
) -> AsyncIterator[Finding]:
    key = Keys(prefix).barrier  # each scheduler writes it to find out whether it may write
    lease = secrets.randbelow(2**62) + 1
    steps: Sequence[tuple[str, Callable[[], Awaitable[object]]]] = (
        ("read", partial(client.read, key)),
        ("write", partial(client.put, key, b"")),
        ("grant leases", partial(_lease, client, lease)),
    )
    for what, step in steps:
        try:
            await _patient(step)
        except (NoAnswerError, FullError) as failure:
            yield error(RIGHTS, "--store", f"etcd does not let it {what}: {failure}")
        except EtcdError as failure:
            message = f"etcd does not let it {what} below {prefix}: {failure.message}"
            yield error(RIGHTS, _login(settings), message)
        else:
            yield ok(RIGHTS, "--store", f"it may {what} below {prefix}")


async def _patient(step: Callable[[], Awaitable[Answer]]) -> Answer:
    """Do something in etcd. While no member answers, repeat it until the time has passed.

    The time limits of a scheduler's calls are short, because it has other members and other work.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return await step()
        except FullError:
            raise
        except NoAnswerError:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(_PAUSE_S)


async def _lease(client: EtcdClient, lease: int) -> None:
    await client.grant_lease(lease, _LEASE_S)
    await client.revoke_lease(lease)


def _login(settings: SchedulerSettings) -> str:
    return "--store-cert" if settings.store_cert and not settings.store_user else "--store-user"
