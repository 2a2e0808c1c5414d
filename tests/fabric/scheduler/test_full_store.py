"""An etcd whose database exceeds its quota: everybody is told, and grants continue afterwards."""

from __future__ import annotations

import logging
from pathlib import Path

import aiohttp
import pytest
from support.edge.live_edge import Asked
from support.fabric.in_process import running_edge
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.full_etcd import QUOTA_FLAGS, fill, make_room
from support.scheduler.scheduler_harness import SchedulerHarness

from duplane.fabric.errors import FabricError, Reason
from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.store.etcd import write_check
from duplane.tools.operators.snapshots import read_fabric
from duplane.tools.operators.tables import fabric_json, fabric_tables


def is_writable(harness: SchedulerHarness) -> float | None:
    return harness.metrics.get_sample_value("duplane_store_writable")


async def test_full_store_is_shown_everywhere_until_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, write_check.__name__)
    monkeypatch.setattr(write_check, "INTERVAL_S", 0.05)
    monkeypatch.setattr(write_check, "RETRY_S", 0.05)
    async with (
        EtcdCluster.running(tmp_path, flags=QUOTA_FLAGS) as etcd,
        SchedulerHarness.running(store=etcd.url("/test/"), queued_interval_s=0.2) as busy,
        SchedulerHarness.running(store=etcd.url("/test/"), queued_interval_s=0.2) as idle,
        running_edge(idle.address) as edge,
        aiohttp.ClientSession() as session,
    ):
        asked = Asked(edge.address, session)
        client = EtcdClient(etcd.addresses)
        worker = await busy.worker()
        await worker.claim(await (await busy.caller()).granted())
        waiting = await busy.caller()
        await waiting.stands(1)
        operators = [await one.operator() for one in (busy, idle)]
        for operator in operators:
            await operator.until(lambda seen: "w" in seen.workers and not seen.store_refusal)
        assert (await asked.get("/ready"))["status"] == "ready"

        await fill(client)
        for operator in operators:  # also at the scheduler that writes nothing
            await operator.until(lambda seen: "quota" in seen.store_refusal)
            assert "w" in operator.workers
        code, unready = await asked.ask("GET", "/ready")
        assert (code, "quota" in unready["reason"]) == (503, True)
        status = await asked.get("/status")
        assert status["is_scheduler_reachable"] is True
        assert status["gateway_healthy"] is False
        assert "quota" in status["store_refusal"]
        views = await read_fabric([idle.address])
        assert "quota" in fabric_tables(views, 1)
        assert "quota" in fabric_json(views)["schedulers"][0]["store_refusal"]
        assert [is_writable(one) for one in (busy, idle)] == [0, 0]
        assert sum("quota" in record.message for record in caplog.records) == 2
        refused = await (await idle.caller()).refused()
        assert refused.reason is Reason.UNAVAILABLE
        assert "quota" in refused.message
        with pytest.raises(FabricError, match="quota"):
            await idle.worker("other")
        await worker.finish(0)

        await make_room(client)
        for operator in operators:
            await operator.until(lambda seen: not seen.store_refusal)
        await worker.claim(await waiting.granted())
        assert (await asked.get("/ready"))["status"] == "ready"
        assert [is_writable(one) for one in (busy, idle)] == [1, 1]
        assert sum("accepts writes again" in record.message for record in caplog.records) == 2
        await client.close()
