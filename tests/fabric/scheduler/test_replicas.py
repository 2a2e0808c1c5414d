"""Three schedulers on one etcd: their clients use different schedulers, and schedulers die."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import pytest
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import Caller, FakeWorker, SchedulerHarness
from support.time_limits import WITHIN_S
from support.tools.command import run_command

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.etcd.v3 import etcd_pb2

COUNT = 3


@pytest.fixture
async def replicas(etcd: EtcdCluster, prefix: str) -> AsyncGenerator[list[SchedulerHarness]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                SchedulerHarness.running(store=etcd.url(prefix), queued_interval_s=0.2)
            )
            for _ in range(COUNT)
        ]


async def keys_of_all(worker: FakeWorker) -> None:
    """Wait until a worker has the verification keys of all schedulers."""
    await worker.until(lambda: len(worker.registered.verification_keys) == COUNT)


async def test_worker_and_caller_meet_at_different_schedulers(
    replicas: list[SchedulerHarness],
) -> None:
    first, second, third = replicas
    worker = await first.worker()
    await keys_of_all(worker)
    operator = await third.operator()
    await operator.until(lambda seen: "w" in seen.workers)
    granted = await (await second.caller(session_id="s")).granted()
    await worker.claim(granted)
    await operator.until(lambda seen: seen.leases[granted.lease_id].is_claimed)
    await third.release(granted.lease_id)
    assert (await worker.revoked()).lease_id == granted.lease_id
    await worker.finish(0)
    await operator.until(lambda seen: not seen.leases)
    await operator.drain("w")
    await worker.until(lambda: any(one.HasField("drain") for one in worker.received))


async def test_operators_see_and_drain_a_worker_at_any_scheduler(
    replicas: list[SchedulerHarness],
) -> None:
    first, second, third = replicas
    worker = await first.worker()
    for replica in replicas:
        operator = await replica.operator()
        await operator.until(lambda seen: "w" in seen.workers)
        code, output = await run("status", "--scheduler", replica.address)
        assert code == 0
        assert ["w", "ready"] in [row.split()[:2] for row in output.splitlines()]
    await second.stop()
    code, _ = await run("drain", "w", "--scheduler", f"{second.address},{third.address}")
    assert code == 0
    await worker.until(lambda: any(one.HasField("drain") for one in worker.received))
    operator = await third.operator()
    await operator.until(lambda seen: seen.workers["w"].is_draining)
    _, output = await run("status", "--scheduler", third.address)
    assert ["w", "draining"] in [row.split()[:2] for row in output.splitlines()]


async def run(*arguments: str) -> tuple[int, str]:
    """Run `duplane` in a thread, so that the schedulers of the test can answer it."""
    return await asyncio.to_thread(run_command, *arguments)


async def test_one_queue_is_served_in_order_by_all(replicas: list[SchedulerHarness]) -> None:
    worker = await replicas[0].worker()
    await keys_of_all(worker)
    running = await (await replicas[1].caller()).granted()
    await worker.claim(running)
    callers: list[Caller] = []
    for position in range(1, 13):
        callers.append(await replicas[position % COUNT].caller())
        await callers[-1].stands(position)
    for caller in callers:
        await worker.finish(0)
        await worker.claim(await caller.granted())
    for caller in callers:
        positions = [queued.position for queued in caller.queued]
        assert positions == sorted(positions, reverse=True)


async def test_callers_of_a_stopped_scheduler_keep_their_places(
    replicas: list[SchedulerHarness],
) -> None:
    first, second, third = replicas
    worker = await first.worker()
    await worker.claim(await (await first.caller()).granted())
    ahead = await second.caller()
    await ahead.stands(1)
    behind = await third.caller()
    await behind.stands(2)
    await second.stop()
    assert (await ahead.refused()).reason is Reason.UNAVAILABLE
    back = await third.caller(request_id=ahead.request.request_id, **ahead.place)
    await back.stands(1)
    await worker.finish(0)
    await worker.claim(await back.granted())
    await worker.finish(0)
    await worker.claim(await behind.granted())


async def test_call_that_stays_open_gets_no_grant_when_its_caller_returns_elsewhere(
    replicas: list[SchedulerHarness],
) -> None:
    """The first scheduler does not know that the connection to the caller is lost."""
    first, second, third = replicas
    worker = await first.worker()
    await worker.claim(await (await first.caller()).granted())
    half_open = await second.caller()
    await half_open.stands(1)
    request_id = half_open.request.request_id
    back = await third.caller(request_id=request_id, **half_open.place)
    await back.stands(1)
    assert (await half_open.refused()).reason is Reason.SUPERSEDED
    await worker.finish(0)
    await worker.claim(await back.granted())


async def test_grant_that_was_not_read_goes_to_the_caller_that_returns_elsewhere(
    replicas: list[SchedulerHarness],
) -> None:
    first, second, third = replicas
    worker = await first.worker()
    await keys_of_all(worker)
    half_open = await second.caller()
    operator = await third.operator()
    await operator.until(lambda seen: bool(seen.leases))
    back = await third.caller(request_id=half_open.request.request_id)
    granted = await back.granted()
    assert granted.lease_id in operator.leases
    await worker.claim(granted)


async def test_worker_attaches_at_another_scheduler_and_keeps_its_session(
    replicas: list[SchedulerHarness],
) -> None:
    first, second, third = replicas
    worker = await first.worker(slot_count=2)
    await keys_of_all(worker)
    granted = await (await third.caller()).granted()
    claims = await worker.claim(granted)
    moved = FakeWorker(await second.channel(), worker.register)
    moved.slots = worker.slots
    await moved.attach_again()
    assert (await worker.ended()).reason is Reason.SUPERSEDED
    assert moved.registered.worker_epoch > claims.worker_epoch
    operator = await third.operator()
    await operator.until(lambda seen: granted.lease_id in seen.leases)
    later = await (await third.caller()).granted()
    assert (await moved.claim(later)).slot != claims.slot
    await moved.vanish()


async def all_present(client: EtcdClient, prefix: str) -> Sequence[etcd_pb2.KeyValue]:
    """Wait until each scheduler has its presence key; return the keys."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            _, present = await client.read_all(f"{prefix}presence/".encode())
            if len(present) == COUNT:
                return present
            await asyncio.sleep(0.05)


async def test_lost_presence_costs_nothing(
    replicas: list[SchedulerHarness],
    client: EtcdClient,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If etcd deletes the presence keys of live schedulers, each scheduler writes its key again."""
    first, second, _ = replicas
    worker = await first.worker(slot_count=1)
    await worker.claim(await (await first.caller()).granted())
    waiting = await first.caller()
    await waiting.stands(1)
    behind = await second.caller()
    await behind.stands(2)
    for presence in await all_present(client, prefix):
        await client.revoke_lease(presence.lease)
    await all_present(client, prefix)
    for caller in (waiting, behind):
        await worker.finish(0)
        await worker.claim(await caller.granted())
    # On a slow machine, a key may also end by itself.
    assert caplog.text.count("announcing it again") >= COUNT
    assert "has ended in etcd" not in caplog.text


async def test_absent_schedulers_session_is_ended_by_the_others(
    replicas: list[SchedulerHarness], client: EtcdClient, prefix: str
) -> None:
    """A scheduler that is killed leaves keys in etcd; the other schedulers delete them."""
    first, second, _ = replicas
    worker = await first.worker(slot_count=1)
    (registration,) = (await client.read(f"{prefix}worker/w".encode())).kvs
    (presence,) = (await client.read(f"{prefix}presence/{registration.lease:x}".encode())).kvs
    await first.kill()
    await client.revoke_lease(presence.lease)  # as etcd does when it expires
    operator = await second.operator()
    await operator.until(lambda seen: not seen.workers)
    async with asyncio.timeout(WITHIN_S):  # the lease is revoked after its keys are deleted
        while await client.lease_ttl_s(registration.lease) >= 0:
            pass
    await worker.vanish()


async def test_lost_session_brings_workers_and_callers_back(
    replicas: list[SchedulerHarness], client: EtcdClient, prefix: str
) -> None:
    """etcd ends the session of a live scheduler.

    Its workers register again, and its callers continue to wait.
    """
    first, second, _ = replicas
    worker = await first.worker(slot_count=1)
    granted = await (await first.caller()).granted()
    await worker.claim(granted)
    waiting = await first.caller()
    await waiting.stands(1)
    behind = await second.caller()
    await behind.stands(2)
    (registration,) = (await client.read(f"{prefix}worker/w".encode())).kvs
    await client.revoke_lease(registration.lease)
    assert (await worker.ended()).reason is Reason.SUPERSEDED
    await worker.attach_again()
    operator = await second.operator()
    await operator.until(lambda seen: granted.lease_id in seen.leases)
    await operator.until(lambda seen: waiting.ticket_id in seen.tickets)
    await worker.finish(0)
    await worker.claim(await waiting.granted())
    await worker.finish(0)
    await worker.claim(await behind.granted())


async def test_key_of_a_stopped_scheduler_is_still_trusted(
    replicas: list[SchedulerHarness],
) -> None:
    """An edge may hold a lease that the scheduler signed just before the scheduler stopped."""
    first, second, _ = replicas
    worker = await first.worker()
    await keys_of_all(worker)
    granted = await (await second.caller()).granted()
    await second.stop()
    await worker.attach_again()
    assert len(worker.registered.verification_keys) == COUNT
    assert granted.lease.key_id in {key.key_id for key in worker.registered.verification_keys}


async def served(caller: Caller, replicas: list[SchedulerHarness]) -> lease_pb2.Granted:
    """Wait for the grant. If the scheduler has died, wait at another scheduler."""
    async with asyncio.timeout(2 * WITHIN_S):
        for attempt in range(100):
            try:
                return await caller.granted()
            except (FabricError, EOFError):
                harness = replicas[attempt % len(replicas)]
                request_id = caller.request.request_id
                caller = await harness.caller(request_id=request_id, **caller.place)
    raise AssertionError("never served")


@pytest.mark.slow
async def test_killed_scheduler_loses_no_ticket_and_no_order(
    replicas: list[SchedulerHarness],
) -> None:
    killed, *alive = replicas
    worker = await alive[0].worker(slot_count=1)
    await worker.claim(await (await alive[0].caller()).granted())
    callers: list[Caller] = []
    for position in range(1, 10):
        callers.append(await replicas[position % COUNT].caller())
        await callers[-1].stands(position)
    orders = [caller.ticket_id for caller in callers]
    await killed.kill()
    serving = [asyncio.create_task(served(caller, alive)) for caller in callers]
    lease_ids: list[str] = []
    served_in_order: list[str] = []
    for _ in callers:
        await worker.finish(0)
        done, _ = await asyncio.wait(
            [one for one in serving if not one.done() or one.result().lease_id not in lease_ids],
            return_when=asyncio.FIRST_COMPLETED,
            timeout=2 * WITHIN_S,
        )
        (granted,) = (one.result() for one in done)
        await worker.claim(granted)
        lease_ids.append(granted.lease_id)
        served_in_order.append(granted.ticket_id)
    assert served_in_order == orders
    assert len(set(lease_ids)) == len(callers)
