"""Wall clocks that jump by hours, on the hosts of schedulers, workers or edges."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fabric.cluster import START_S, Cluster
from support.fabric.cluster_clients import queueing, serve, talking
from support.fabric.wall_clocks import wall_clock

pytestmark = pytest.mark.timing


@pytest.mark.parametrize("hosts", ["one scheduler", "schedulers", "workers", "edges"])
async def test_clock_that_jumps_is_noticed_by_no_client(
    cluster: Cluster, hosts: str, tmp_path: Path
) -> None:
    servers = {
        "one scheduler": cluster.schedulers[:1],  # edges call the first scheduler before the others
        "schedulers": cluster.schedulers,
        "workers": cluster.workers,
        "edges": cluster.edges,
    }[hosts]
    with wall_clock(servers, tmp_path) as clock:
        await cluster.settled(START_S)
        async with talking(cluster, 0) as (talker,):
            for hours in (3, -3, 0):
                clock.set(hours)
                await talker.exchange()
                async with (
                    talking(cluster, 0, len(cluster.workers) - 1) as (other, *_),
                    queueing(cluster, 1) as (waiting,),
                ):
                    await other.end()
                    await serve(waiting)
            await talker.end()
