"""One etcd for the tests of this folder; each test uses a prefix of its own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator

import pytest
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import SchedulerHarness

from duplane.scheduler.etcd.client import EtcdClient

_numbers = itertools.count()


@pytest.fixture(scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[EtcdCluster]:
    async with EtcdCluster.running(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
async def client(etcd: EtcdCluster) -> AsyncGenerator[EtcdClient]:
    opened = EtcdClient(etcd.addresses)
    yield opened
    await opened.close()


@pytest.fixture
def prefix() -> str:
    return f"/test-{next(_numbers)}/"


@pytest.fixture(params=["memory", "etcd"])
def store_url(request: pytest.FixtureRequest, prefix: str) -> str:
    """Yield the `--store` of each kind of store."""
    if request.param == "memory":
        return "memory:"
    etcd: EtcdCluster = request.getfixturevalue("etcd")
    return etcd.url(prefix)


@pytest.fixture
def every_store(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with schedulers on each store."""
    monkeypatch.setattr(SchedulerHarness, "store", store_url)
