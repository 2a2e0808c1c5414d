"""Clients that return to their sessions while hosts are lost or cut off from each other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest
from support.edge.returning_client import SAMPLES, SPEAKERS
from support.fabric.cluster import Cluster
from support.fabric.hosts import Host
from support.fabric.returning_callers import Addressed, Caller
from support.fabric.servers import Server
from support.time_limits import WITHIN_S, until

pytestmark = pytest.mark.timing


@dataclass(kw_only=True)
class HostCaller(Caller):
    """A client on the host for clients."""

    cluster: Cluster

    async def connect(self, edge: Addressed) -> None:
        addresses = [one.address for one in self.cluster.edges]
        connecting = self.cluster.connect(addresses.index(edge.address), self.speaker.path)
        self.client = await self.sockets.enter_async_context(connecting)

    async def worker(self) -> Server[Host]:
        """Wait until a worker has logged the begin of the session; return this worker."""
        line = f"session {self.token.partition('.')[0]} begins"
        found: list[Server[Host]] = []

        async def has_begun() -> bool:
            found[:] = [one for one in self.cluster.workers if line in one.log.read_text()]
            return bool(found)

        await until(has_begun, WITHIN_S)
        return found[0]


@pytest.fixture
async def caller(cluster: Cluster) -> AsyncGenerator[HostCaller]:
    """Yield the client of a session with three units at the first edge."""
    async with contextlib.AsyncExitStack() as sockets:
        caller = HostCaller(SPEAKERS["b"], sockets, cluster=cluster)
        await caller.begin(cluster.edges[0])
        await caller.units(3)
        yield caller


async def goes_on(caller: HostCaller, count: int) -> None:
    """Return to the second edge after `count` units. Say two more, which must be the next."""
    assert (await caller.come_back(caller.cluster.edges[1]))["next_sample"] == count * SAMPLES
    await caller.units(2)
    units = [event["unit"] for event in caller.heard if event["part"] == 0]
    assert units == list(range(count + 2))
    await caller.cluster.until_count("lease_count", 1)


async def test_newest_copy_is_used_if_an_edge_was_cut_off_from_a_worker(
    cluster: Cluster, caller: HostCaller
) -> None:
    edge, worker = cluster.edges[0], await caller.worker()
    cluster.network.cut(edge.host, worker.host)
    try:
        await caller.units(2)  # at another worker
        edge.kill()
        await goes_on(caller, 5)
    finally:
        cluster.network.mend(edge.host, worker.host)
    await caller.end()


async def test_client_that_is_cut_off_from_its_edge_goes_on_at_another(
    cluster: Cluster, caller: HostCaller
) -> None:
    edge = cluster.edges[0]
    cluster.network.cut(edge.host, cluster.client)
    try:
        await goes_on(caller, 3)  # the first edge has not noticed anything yet
    finally:
        cluster.network.mend(edge.host, cluster.client)
    await caller.end()


async def test_session_is_resumed_while_no_scheduler_answers(
    cluster: Cluster, caller: HostCaller
) -> None:
    other = HostCaller(caller.speaker, caller.sockets, cluster=cluster)
    await other.ask(cluster.edges[1], token="sess_unknown.x")  # now the edge knows all workers
    for scheduler in cluster.schedulers:
        scheduler.kill()
    cluster.edges[0].kill()
    assert (await caller.come_back(cluster.edges[1]))["next_sample"] == 3 * SAMPLES
    await caller.units(2)
    for scheduler in cluster.schedulers:
        scheduler.start()
    await caller.units(1)
    await caller.end()


async def test_session_is_resumed_without_a_quorum_of_etcd(
    cluster: Cluster, caller: HostCaller
) -> None:
    for member in cluster.etcd[:2]:
        member.kill()
    cluster.edges[0].kill()
    assert (await caller.come_back(cluster.edges[1]))["next_sample"] == 3 * SAMPLES
    await caller.units(2)
    for member in cluster.etcd[:2]:
        member.start()
    await caller.units(1)
    await caller.end()
