"""Lost and hung devices, broken slots, and their log messages."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.trace import StatusCode
from support.time_limits import WITHIN_S
from support.worker.worker_harness import running_worker, unit

from duplane.fabric.process import FatalError
from duplane.fabric.v1 import registry_pb2, session_pb2
from duplane.worker.models.types import Unit, UnitFailure, UnitOutput

pytestmark = pytest.mark.timing


async def test_a_broken_slot_is_checked_again_and_freed_when_it_is_clean() -> None:
    async with running_worker(recheck_interval_s=0.05) as rig:
        async with rig.opened() as client:
            rig.model.is_dirty = lambda slot: slot == 0
            await client.end()
        await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_BROKEN)
        rig.model.is_dirty = lambda slot: False
        await rig.all_free()
        async with rig.opened(rig.grant(0)) as client:
            await client.send(unit(0))
            assert (await client.delta()).sequence == 0


async def test_a_lost_device_closes_every_session_and_ends_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        running_worker(is_broken_at_end=True) as rig,
        rig.opened(rig.grant(0)) as first,
        rig.opened(rig.grant(1)) as second,
    ):

        def fail(unit_: Unit, length: int) -> UnitOutput:
            rig.model.device_error = RuntimeError("CUDA error: device-side assert")
            raise RuntimeError("CUDA error")

        rig.model.answer = fail
        await first.send(unit(0))
        for client in (first, second):
            closed = await client.closed()
            assert closed.reason == session_pb2.CLOSE_REASON_ENGINE_FAILED
            assert "CUDA" not in closed.message
        await asyncio.wait({rig.task}, timeout=WITHIN_S)
        assert isinstance(rig.task.exception(), FatalError)
        assert "worker worker-under-test: the device failed: RuntimeError: CUDA" in caplog.text


async def test_a_call_that_never_returns_ends_the_sessions_and_the_worker() -> None:
    async with (
        running_worker(stuck_after_s=0.5, hung_after_s=1.5, is_broken_at_end=True) as rig,
        rig.opened() as client,
    ):
        rig.model.hold()
        await client.send(unit(0))
        await client.leaving()
        closed = await client.closed()
        assert closed.reason == session_pb2.CLOSE_REASON_ENGINE_FAILED
        await asyncio.wait({rig.task}, timeout=WITHIN_S)
        assert isinstance(rig.task.exception(), FatalError)
        rig.model.let_go()


async def test_a_lost_session_is_an_error_in_the_log_and_in_its_span(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_worker() as rig:
        async with rig.opened(rig.grant(0, session_id="lost")) as client:
            rig.model.answer = lambda unit_, length: UnitFailure(unit_.slot, "NAN", "no", True)
            await client.send(unit(0))
            await client.failed()
            await client.closed()
        async with rig.opened(rig.grant(1, session_id="well")) as client:
            await client.end()
        await rig.all_free()
        (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
        assert "worker worker-under-test slot 0: session lost ended: ENGINE_FAILED" in (
            record.getMessage()
        )
    # The worker has stopped, so all spans have ended.
    statuses = {
        dict(span.attributes or {})["session.id"]: span.status.status_code
        for span in rig.spans.get_finished_spans()
        if span.name == "worker.session"
    }
    assert statuses == {"lost": StatusCode.ERROR, "well": StatusCode.UNSET}
