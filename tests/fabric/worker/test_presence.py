"""A worker attaches to schedulers, reports, drains, stops, and records spans."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import StatusCode
from support.time_limits import WITHIN_S
from support.worker.fake_scheduler import FakeScheduler
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import pcm, running_worker, unit

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.monitoring import spans
from duplane.fabric.process import Shutdown
from duplane.fabric.v1 import lease_pb2, registry_pb2, session_pb2, trace_pb2
from duplane.worker import attach
from duplane.worker.engine.model_runner import ModelRunner
from duplane.worker.service import serve
from duplane.worker.settings import WorkerSettings

FREE, OCCUPIED = registry_pb2.SLOT_STATE_FREE, registry_pb2.SLOT_STATE_OCCUPIED


async def test_a_worker_says_who_it_is() -> None:
    async with running_worker(
        pool="blue", advertise="127.0.0.9:1", labels=("zone=a", "device=fast")
    ) as rig:
        register = rig.scheduler.registers[0]
        assert register.worker_id == "worker-under-test"
        assert register.incarnation
        assert register.address == "127.0.0.9:1"
        assert register.pool == "blue"
        assert dict(register.labels) == {"model": "scripted", "device": "fast", "zone": "a"}
        assert register.device.name == "scripted"
        assert register.model.parameter_count == 42
        assert register.model.context_token_limit == 8192
        assert list(register.kinds) == [
            lease_pb2.SESSION_KIND_AUDIO_DUPLEX,
            lease_pb2.SESSION_KIND_OMNI_DUPLEX,
            lease_pb2.SESSION_KIND_CHAT,
        ]
        assert [slot.state for slot in register.slots] == [FREE, FREE]


async def test_every_change_of_a_slot_is_reported() -> None:
    async with running_worker() as rig:
        granted = rig.grant(1, fencing_number=9, tenant_id="a")
        async with rig.opened(granted) as client:
            await rig.scheduler.until_slot(1, OCCUPIED)
            report = rig.scheduler.report.slots[1]
            assert (report.lease_id, report.fencing_number) == (granted.lease_id, 9)
            assert report.session_id.startswith("session-")
            assert report.tenant_id == "a"
            await client.send(unit(0))
            await client.delta()
        await rig.all_free()
        report = rig.scheduler.report
        assert report.slots[1].fencing_number == 9
        assert (report.slots[1].lease_id, report.slots[1].tenant_id) == ("", "")
        assert report.unit_count == 1
        assert report.unit_time.nanos > 0
        assert report.memory_used_bytes > 0


async def test_a_worker_reports_at_the_interval_when_nothing_changes() -> None:
    async with running_worker() as rig:
        rig.scheduler.report_interval_s = 0  # the worker applies its own minimum
        await rig.scheduler.stop()
        await rig.scheduler.start(rig.scheduler.address)
        count = rig.scheduler.report_count
        await rig.scheduler.until(lambda: rig.scheduler.report_count >= count + 3)


async def test_sessions_go_on_without_a_scheduler_and_are_named_to_the_next() -> None:
    async with running_worker() as rig:
        granted = rig.grant(1)
        async with rig.opened(granted) as client:
            await rig.scheduler.stop()
            await client.send(unit(0))
            assert (await client.delta()).sequence == 0
            await rig.scheduler.start(rig.scheduler.address)
            await rig.scheduler.until(lambda: len(rig.scheduler.registers) == 2)
            first, second = rig.scheduler.registers
            assert second.incarnation == first.incarnation
            assert second.slots[1].state == OCCUPIED
            assert second.slots[1].lease_id == granted.lease_id
            await client.send(unit(1))
            assert (await client.delta()).sequence == 1


async def test_a_worker_that_is_refused_comes_back() -> None:
    async with running_worker() as rig:
        await rig.scheduler.stop()
        rig.scheduler.refusal = FabricError(Reason.WORKER_ATTACHED, "somebody has your name")
        await rig.scheduler.start(rig.scheduler.address)
        await rig.scheduler.until(lambda: len(rig.scheduler.registers) == 3)
        assert [one.stream_number for one in rig.scheduler.registers] == [1, 2, 3]
        rig.scheduler.refusal = None
        count = rig.scheduler.report_count
        await rig.scheduler.until(lambda: rig.scheduler.report_count > count)


async def test_a_worker_attaches_as_soon_as_its_scheduler_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attach, "FIRST_BACKOFF_S", 600.0)
    monkeypatch.setattr(attach, "MAX_BACKOFF_S", 600.0)
    async with running_worker() as rig:
        await rig.scheduler.stop()
        await rig.scheduler.start(rig.scheduler.address)
        await rig.scheduler.until(lambda: len(rig.scheduler.registers) == 2)


async def test_a_worker_attaches_as_soon_as_its_scheduler_accepts_calls_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attach, "FIRST_BACKOFF_S", 600.0)
    monkeypatch.setattr(attach, "MAX_BACKOFF_S", 600.0)
    async with running_worker(schedulers=("127.0.0.1:1",)) as rig:
        await rig.scheduler.stop()
        rig.scheduler.refusal = FabricError(Reason.UNAVAILABLE, "no contact to the store")
        await rig.scheduler.start(rig.scheduler.address)
        await rig.scheduler.set_serving(False)
        count = len(rig.scheduler.registers)
        await rig.scheduler.until(lambda: len(rig.scheduler.registers) > count)
        rig.scheduler.refusal, reports = None, rig.scheduler.report_count
        await rig.scheduler.set_serving(True)
        await rig.scheduler.until(lambda: rig.scheduler.report_count > reports)


async def test_a_worker_goes_to_the_next_scheduler_and_keeps_its_sessions() -> None:
    second = FakeScheduler()
    second.epochs = itertools.count(901)
    await second.start()
    await second.stop()
    async with running_worker(schedulers=(second.address, "127.0.0.1:1")) as rig:
        first = rig.scheduler
        in_transit = rig.grant(1)
        granted = rig.grant(0)
        async with rig.opened(granted) as client:
            await first.stop()
            await second.start(second.address)
            await second.until(lambda: second.report_count > 0)
            assert second.registers[0].slots[0].lease_id == granted.lease_id
            await client.send(unit(0))
            assert (await client.delta()).sequence == 0
            async with rig.claimed(in_transit):  # granted by the first scheduler
                await second.until_slot(1, OCCUPIED)
        await second.stop()
        await first.start(first.address)
        await first.until(lambda: len(first.registers) == 2)


async def test_a_drained_worker_lets_sessions_end_and_then_stops() -> None:
    async with running_worker() as rig:
        async with rig.opened() as client:
            rig.shutdown.drain()
            leaving = await client.leaving()
            assert leaving.reason == session_pb2.LEAVING_REASON_DRAIN
            assert leaving.remaining_time.seconds == 600
            await rig.scheduler.until(lambda: rig.scheduler.report.is_draining)
            await client.send(unit(0))
            assert (await client.delta()).sequence == 0
            assert not rig.task.done()
            await client.end()
        async with asyncio.timeout(WITHIN_S):
            await rig.task


async def test_a_drain_is_taken_back() -> None:
    async with running_worker() as rig:
        await rig.scheduler.tell(drain=registry_pb2.Drain())
        await rig.scheduler.until(lambda: rig.scheduler.report.is_draining)
        await rig.scheduler.tell(undrain=registry_pb2.Undrain())
        await rig.scheduler.until(lambda: not rig.scheduler.report.is_draining)
        async with rig.opened() as client:
            await client.send(unit(0))
            assert (await client.delta()).sequence == 0
            rig.shutdown.drain()
            await rig.scheduler.until(lambda: rig.scheduler.report.is_draining)
            count = rig.scheduler.report_count
            await rig.scheduler.tell(undrain=registry_pb2.Undrain())
            await rig.scheduler.until(lambda: rig.scheduler.report_count > count)
            assert rig.scheduler.report.is_draining, "the process ends"


async def test_sessions_learn_that_a_drain_is_taken_back_and_of_the_next_drain() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await rig.scheduler.tell(undrain=registry_pb2.Undrain())  # not told: there was no drain
        for _ in range(2):
            await rig.scheduler.tell(drain=registry_pb2.Drain())
            await client.leaving()
            await rig.scheduler.tell(undrain=registry_pb2.Undrain())
            await client.staying()
        rig.shutdown.drain()
        assert (await client.leaving()).remaining_time.seconds == 600
        await rig.scheduler.tell(undrain=registry_pb2.Undrain())  # not told: the process ends
        await client.send(unit(0))
        assert (await client.delta()).sequence == 0


async def test_an_operator_can_stop_a_worker() -> None:
    async with running_worker() as rig:
        async with rig.opened() as client:
            await rig.scheduler.tell(drain=registry_pb2.Drain(is_stop=True))
            assert (await client.leaving()).remaining_time.seconds == 600
            assert not rig.task.done()
        async with asyncio.timeout(WITHIN_S):
            await rig.task
        assert rig.scheduler.report.is_leaving


async def test_a_worker_that_ends_as_planned_says_so_in_its_last_report() -> None:
    async with running_worker() as rig:
        assert not rig.scheduler.report.is_leaving
        rig.shutdown.drain()
        await rig.scheduler.until(lambda: rig.scheduler.report.is_leaving)
        assert rig.scheduler.report.is_draining


async def test_a_drain_names_the_sessions_that_cannot_move_and_waits_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_worker() as rig:
        lease = rig.grant(0, session_id="fixed")
        async with rig.opened(lease) as client, rig.opened(rig.grant(1)) as other:
            await client.send(unit(0, cannot_move=True))
            await client.delta()
            await other.send(unit(0))
            await other.delta()
            await rig.scheduler.until(lambda: rig.scheduler.report.slots[0].cannot_move)
            assert not rig.scheduler.report.slots[1].cannot_move
            rig.shutdown.drain()
            await client.leaving()
            (record,) = [one for one in caplog.records if "cannot move" in one.message]
            assert record.levelname == "WARNING"
            assert "at most 600 s: fixed" in record.message
            await client.send(unit(1, cannot_move=True))
            assert (await client.delta()).sequence == 1
            await other.leaving()
            await other.send(unit(1, cannot_move=True))
            assert (await other.delta()).sequence == 1
            assert sum("can no longer move" in one.message for one in caplog.records) == 1
            for one in (client, other):
                await one.end()
        async with asyncio.timeout(WITHIN_S):
            await rig.task


async def test_the_next_session_of_a_slot_can_move_again() -> None:
    async with running_worker() as rig:
        async with rig.opened(rig.grant(0)) as client:
            await client.send(unit(0, cannot_move=True))
            await rig.scheduler.until(lambda: rig.scheduler.report.slots[0].cannot_move)
        await rig.all_free()
        assert not rig.scheduler.report.slots[0].cannot_move


@pytest.mark.timing
async def test_a_session_that_outlasts_the_drain_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_worker(drain_timeout_s=0.05) as rig:
        async with rig.opened(rig.grant(0, session_id="long")) as client:
            rig.shutdown.drain()
            await client.leaving()
            assert (await client.closed()).reason == session_pb2.CLOSE_REASON_SHUTDOWN
        (record,) = [one for one in caplog.records if "the drain has waited" in one.message]
        assert record.message.endswith("these sessions end with this worker: long")


async def test_cancelling_a_worker_stops_it_at_once_in_mid_unit() -> None:
    async with running_worker() as rig, rig.opened() as client:
        rig.model.hold()
        await client.send(unit(0))
        await rig.model.held()
        rig.task.cancel()
        assert (await client.refused()).reason is Reason.UNAVAILABLE
        rig.model.let_go()
        await asyncio.wait({rig.task})
        assert rig.task.cancelled()
        rig.shutdown.drain()


async def health_of(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="duplane.fabric.v1.SessionService")
        return (await stub.Check(request)).status


@pytest.mark.timing
async def test_a_stuck_device_is_noticed_and_forgiven() -> None:
    status = health_pb2.HealthCheckResponse
    async with running_worker(stuck_after_s=1.0) as rig, rig.opened() as client:
        assert await health_of(rig.address) == status.SERVING
        rig.model.hold()
        await client.send(unit(0))
        await rig.scheduler.until(lambda: rig.scheduler.report.is_draining)
        assert await health_of(rig.address) == status.NOT_SERVING
        assert (await client.leaving()).reason == session_pb2.LEAVING_REASON_STUCK_DEVICE
        rig.model.let_go()
        assert (await client.delta()).sequence == 0
        await rig.scheduler.until(lambda: not rig.scheduler.report.is_draining)
        assert await health_of(rig.address) == status.SERVING


async def test_a_checkpoint_that_cannot_be_loaded_ends_the_worker_with_its_own_error() -> None:
    model = ScriptedModel()

    def fail() -> NoReturn:
        raise FileNotFoundError("config.json")

    model.load = fail
    settings = WorkerSettings(checkpoint=Path("/nowhere"), schedulers=("127.0.0.1:1",))
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        await serve(settings, Shutdown(), model)


async def test_a_model_that_does_not_clean_up_after_its_warm_up_is_not_served() -> None:
    model = ScriptedModel()
    model.is_dirty = lambda slot: True
    settings = WorkerSettings(checkpoint=Path("/nowhere"), schedulers=("127.0.0.1:1",))
    with pytest.raises(RuntimeError, match="does not clean up"):
        await serve(settings, Shutdown(), model)


TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SESSION_TRACE_ID = "1af7651916cd43dd8448eb211c80319c"


def trace(trace_id: str) -> trace_pb2.TraceContext:
    return trace_pb2.TraceContext(traceparent=f"00-{trace_id}-b7ad6b7169203331-01")


async def test_each_unit_is_a_span_below_its_own_trace_and_linked_to_its_session() -> None:
    async with running_worker() as rig:
        rig.model.stage_s["decode"] = 0.003
        async with rig.opened(trace=trace(SESSION_TRACE_ID)) as client:
            await client.send(unit(0, 0.5, trace=trace(TRACE_ID)))
            delta = await client.delta()
        await rig.all_free()
        exported: dict[str, Any] = {span.name: span for span in rig.spans.get_finished_spans()}
        session, run = exported[spans.WORKER_SESSION], exported[spans.WORKER_UNIT]
        assert f"{session.context.trace_id:032x}" == SESSION_TRACE_ID
        assert f"{run.context.trace_id:032x}" == TRACE_ID
        assert f"{run.parent.span_id:016x}" == "b7ad6b7169203331"
        assert f"{run.links[0].context.trace_id:032x}" == SESSION_TRACE_ID
        assert f"{run.context.span_id:016x}" in delta.trace.traceparent
        assert run.attributes[spans.UNIT_OUTCOME] == "speech"
        assert run.attributes[spans.BATCH_SIZE] == 1
        assert run.attributes[f"{spans.STAGE_PREFIX}decode_ms"] >= 3
        assert run.attributes[spans.SESSION_ID].startswith("session-")
        assert run.end_time > run.start_time


async def test_a_refused_unit_is_a_span_with_its_reason() -> None:
    async with running_worker() as rig:
        async with rig.opened() as client:
            await client.send(unit(0, audio=pcm()[:3], trace=trace(TRACE_ID)))
            await client.failed()
        await rig.all_free()
        exported: dict[str, Any] = {span.name: span for span in rig.spans.get_finished_spans()}
        run = exported[spans.WORKER_UNIT]
        assert f"{run.context.trace_id:032x}" == TRACE_ID
        assert run.status.status_code is StatusCode.ERROR
        assert run.attributes[spans.ERROR_TYPE] == "INVALID_FIELD"
        # The session has no trace context, but the unit's span still links to the session's span.
        session = exported[spans.WORKER_SESSION]
        assert run.links[0].context.span_id == session.context.span_id


async def test_a_worker_whose_device_thread_fails_closes_its_sessions_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*_: object) -> None:
        raise KeyError("a bug of ours")

    async with running_worker() as rig, rig.opened() as client:
        monkeypatch.setattr(ModelRunner, "advance", die)
        await client.send(unit(0))
        assert (await client.closed()).reason == session_pb2.CLOSE_REASON_ENGINE_FAILED
        await asyncio.wait({rig.task})
        failure = rig.task.exception()
        assert isinstance(failure, ExceptionGroup)
        assert failure.subgroup(KeyError)
