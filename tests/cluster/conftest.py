"""One cluster for all tests of this folder. It is repaired after each test."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from support.debian_programs import debian_program
from support.fabric.cluster import Cluster
from support.fabric.hosts import why_no_hosts


@pytest.fixture(scope="session")
async def running_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Cluster]:
    if why := why_no_hosts():
        pytest.skip(why)
    debian_program("etcd", "etcd-server")  # skips the tests if there is no etcd
    async with Cluster.running(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
async def cluster(
    running_cluster: Cluster, request: pytest.FixtureRequest
) -> AsyncGenerator[Cluster]:
    """Yield the cluster; after the test, repair it and wait until every slot is free."""
    yield running_cluster
    try:
        await running_cluster.repair()
    finally:
        request.node.add_report_section("teardown", "logs", running_cluster.logs())
