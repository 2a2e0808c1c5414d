"""Freezes and thaws two etcd leaders in turn: no grant is made twice, and no session is lost.

A scheduler renews a lease in etcd, its presence, to show that it runs. An etcd leader may be frozen
for longer than such a lease lasts. When this leader continues, it can end the lease although the
next leader has renewed it (etcd issue 15247; seen with 3.4.23 and 3.5.16). So a scheduler can lose
its presence. It then announces itself again, and no registration, ticket or grant is lost.

`FREEZE_RUNS=50 pytest tests/fabric/scheduler/test_frozen_leader.py -s` repeats the test, three runs
at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc.aio
import pytest
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import FakeWorker, SchedulerHarness

from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.store.etcd import session

pytestmark = pytest.mark.timing

RUNS = int(os.environ.get("FREEZE_RUNS", "1"))
PARALLEL = 3
TTL_S = 5
FREEZE_S = 6.0  # longer than the life of a presence's lease
RECOVERY_S = 20.0
WORKERS = ("w0", "w1", "w2", "w3")


class Load:
    """Workers that attach again whenever their streams end, and callers that repeat requests."""

    def __init__(self, schedulers: list[SchedulerHarness]) -> None:
        self.schedulers = schedulers
        self.workers: dict[str, FakeWorker] = {}
        self.grant_times: list[float] = [time.monotonic()]
        self.reattached_count = 0
        self.has_granted = asyncio.Condition()
        self.numbers: dict[str, int] = {}  # last fencing number by worker

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        for index, worker_id in enumerate(WORKERS):
            scheduler = self.schedulers[index % len(self.schedulers)]
            self.workers[worker_id] = await scheduler.worker(worker_id)
        for worker in self.workers.values():
            await worker.until(lambda worker=worker: len(worker.registered.verification_keys) > 1)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.attach(one)) for one in self.workers.values()]
            running += [tasks.create_task(self.call(number)) for number in range(len(WORKERS))]
            yield
            for task in running:
                task.cancel()

    async def attach(self, worker: FakeWorker) -> None:
        while True:
            await worker.lost()
            with contextlib.suppress(FabricError, TimeoutError):
                await worker.attach_again()
                self.reattached_count += 1
            await asyncio.sleep(0.1)

    async def call(self, number: int) -> None:
        scheduler = self.schedulers[number % len(self.schedulers)]
        while True:
            caller = await scheduler.caller()
            try:
                granted = await caller.granted()
            except (FabricError, TimeoutError):
                await asyncio.sleep(0.1)
            else:
                await self.use(granted)
            finally:
                await caller.vanish()

    async def use(self, granted: lease_pb2.Granted) -> None:
        """Claim a slot and free it. Ignore a lease of an earlier registration of the worker."""
        worker = self.workers[granted.worker_id]
        claims = lease_pb2.LeaseClaims.FromString(granted.lease.claims)
        if claims.worker_epoch != worker.registered.worker_epoch:
            return
        assert claims.fencing_number > self.numbers.get(granted.worker_id, 0), "granted twice"
        self.numbers[granted.worker_id] = claims.fencing_number
        self.grant_times.append(time.monotonic())
        async with self.has_granted:
            self.has_granted.notify_all()
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await worker.claim(granted)
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await worker.finish(0)

    async def until_all_serve(self) -> None:
        """Wait until every worker has got another grant."""
        before = dict(self.numbers)
        async with asyncio.timeout(RECOVERY_S), self.has_granted:
            await self.has_granted.wait_for(
                lambda: all(self.numbers.get(one, 0) > before.get(one, 0) for one in WORKERS)
            )


async def freeze_two_leaders(folder: Path) -> str:
    async with (
        EtcdCluster.running(folder, 3) as etcd,
        SchedulerHarness.running(store=etcd.url("/d/"), queued_interval_s=0.5) as first,
        SchedulerHarness.running(store=etcd.url("/d/"), queued_interval_s=0.5) as second,
    ):
        load = Load([first, second])
        async with load.running():
            await load.until_all_serve()
            for _ in range(2):
                leader = await etcd.leader()
                leader.freeze()
                await asyncio.sleep(FREEZE_S)
                leader.thaw()
                await load.until_all_serve()
        gaps = [late - soon for soon, late in itertools.pairwise(load.grant_times)]
        assert load.reattached_count == 0
        return f"{len(gaps)} grants, longest gap {max(gaps):.2f} s"


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * RUNS)
async def test_frozen_leaders_cost_no_grant_twice_and_lose_no_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "PRESENCE_TTL_S", TTL_S)
    caplog.set_level(logging.WARNING)
    bound = asyncio.Semaphore(PARALLEL)

    async def one(number: int) -> None:
        async with bound:
            outcome = await freeze_two_leaders(tmp_path / str(number))
            print(f"run {number}: {outcome}", flush=True)

    async with asyncio.TaskGroup() as tasks:
        for number in range(RUNS):
            tasks.create_task(one(number))
    messages = [one.message for one in caplog.records]
    assert not [text for text in messages if "has ended in etcd; beginning" in text]
    announced = sum("announcing it again" in text for text in messages)
    print(f"{RUNS} runs, {announced} presences lost and announced again")
