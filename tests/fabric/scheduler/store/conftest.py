"""Two running schedulers for the tests of this folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.racing_stores import Pair, Scheduler


@pytest.fixture
async def pair(etcd: EtcdCluster, prefix: str) -> AsyncGenerator[Pair]:
    one, other = Scheduler(etcd.url(prefix)), Scheduler(etcd.url(prefix))
    running = [asyncio.create_task(scheduler.store.run()) for scheduler in (one, other)]
    for scheduler in (one, other):
        await scheduler.store.cancel(0)  # returns as soon as the scheduler has a session
    yield one, other
    for task in running:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
