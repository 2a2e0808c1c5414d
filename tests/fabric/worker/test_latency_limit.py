"""A worker whose units are answered too late withholds its free slots, and keeps its sessions."""

from __future__ import annotations

import pytest
from support.monitoring.metrics import logged_url, scrape
from support.worker.worker_harness import Rig, running_worker, unit


def withheld(rig: Rig) -> list[bool]:
    return [slot.is_withheld for slot in rig.scheduler.report.slots]


@pytest.mark.timing
async def test_free_slots_are_withheld_until_the_session_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with running_worker(latency_limit_s=1e-9, metrics_listen="127.0.0.1:0") as rig:
        url = logged_url(caplog.records)
        granted = rig.grant(1)
        async with rig.opened() as client:
            await client.send(unit(0))
            await client.delta()
            assert not any(withheld(rig)), "the unit was not spoken"
            await client.send(unit(1, 0.5))
            await client.delta()
            await rig.scheduler.until(lambda: withheld(rig) == [False, True])
            seen = await scrape(url)
            assert seen.value("duplane_session_capacity") == 1
            assert seen.value("duplane_expected_latency_seconds") > 1e-9
            async with rig.opened(granted) as late:  # of a lease that was granted before
                await late.send(unit(0))
                await late.delta()
                await late.end()
            await client.send(unit(2, 0.5))
            await client.delta()
            await client.end()
        await rig.all_free()
        await rig.scheduler.until(lambda: withheld(rig) == [False, False])


async def test_without_a_limit_nothing_is_withheld() -> None:
    async with running_worker(latency_limit_s=0) as rig:
        async with rig.opened() as client:
            await client.send(unit(0, 0.5))
            await client.delta()
            await client.end()
            assert not any(withheld(rig))
        await rig.all_free()
        assert not any(withheld(rig))
