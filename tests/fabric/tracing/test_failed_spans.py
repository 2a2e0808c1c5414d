"""What fails in the worker has whole spans: refused units have their stages."""

from __future__ import annotations

from support.worker_harness import running_worker, unit

from duplane.fabric.monitoring import spans


async def test_refused_unit_has_the_stage_prepare() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await client.send(unit(0, audio=b""))
        assert (await client.failed()).field == "audio"
        found = rig.spans.get_finished_spans()
    (refused,) = [span for span in found if span.name == spans.WORKER_UNIT]
    (stage,) = refused.events
    assert (stage.name, stage.timestamp) == (spans.PREPARE, refused.start_time)
