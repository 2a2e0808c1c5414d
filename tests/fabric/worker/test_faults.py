"""Faults of a session: silent clients, vanished clients and a failing model."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc.aio
import numpy as np
import pytest
from support.worker.scripted_model import BASE_MEMORY_BYTES, ScriptedModel, answer_loud
from support.worker.worker_harness import Client, Rig, refusal, running_worker, unit

from duplane.fabric.errors import Reason
from duplane.fabric.monitoring.spans import SLOT, WORKER_UNIT
from duplane.fabric.v1 import registry_pb2, session_pb2
from duplane.worker.models.types import Unit, UnitFailure, UnitOutput
from duplane.worker.settings import SessionLimits

Request = session_pb2.ConverseRequest


async def test_an_open_that_fails_ends_the_call_and_frees_the_slot() -> None:
    async with running_worker() as rig, rig.claimed() as client:

        def fail(slot: int, options: object) -> None:
            raise RuntimeError("out of memory")

        rig.model.on_open = fail
        await client.write(Request(open=session_pb2.Open()))
        error = await client.refused()
        assert error.reason is Reason.ENGINE_FAILED
        assert "out of memory" not in error.message
        await rig.all_free()


def _limits(**limits: Any) -> dict[str, Any]:
    return {"limits": SessionLimits(**limits)}


@pytest.mark.timing
async def test_a_slot_that_is_not_opened_in_time_is_freed() -> None:
    async with running_worker(**_limits(open_timeout_s=0.05)) as rig:
        async with rig.claimed() as client:
            assert (await client.refused()).reason is Reason.OPEN_TIMEOUT
            await rig.all_free()
        async with rig.call() as silent:  # a call without a claim occupies no slot
            del silent


@pytest.mark.timing
async def test_silence_ends_a_session() -> None:
    async with running_worker(**_limits(idle_timeout_s=0.05)) as rig, rig.claimed() as client:
        await client.write(Request(open=session_pb2.Open()))
        while not (response := await client.read()).HasField("closed"):
            assert response.HasField("opened")
        assert response.closed.reason == session_pb2.CLOSE_REASON_IDLE_TIMEOUT


async def test_a_paused_session_refuses_units_until_it_resumes() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await client.write(Request(pause=session_pb2.Pause()))
        await client.send(unit(0))
        failed = await client.failed()
        assert (failed.sequence, failed.reason) == (0, "PAUSED")
        await client.write(Request(resume=session_pb2.Resume()))
        await client.send(unit(1))
        assert (await client.delta()).sequence == 1


async def test_a_pause_is_reported_from_its_beginning_to_its_end() -> None:
    async with running_worker() as rig, rig.opened() as client:

        def is_paused() -> bool:
            return rig.scheduler.report.slots[0].is_paused

        await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_OCCUPIED)
        assert not is_paused()
        await client.write(Request(pause=session_pb2.Pause()))
        await rig.scheduler.until(is_paused)
        await client.write(Request(resume=session_pb2.Resume()))
        await rig.scheduler.until(lambda: not is_paused())
        await client.write(Request(pause=session_pb2.Pause()))
        await rig.scheduler.until(is_paused)
        client.vanish()
        await rig.all_free()
        assert not is_paused()


async def test_a_pause_that_lasts_too_long_closes_the_session() -> None:
    async with running_worker() as rig, rig.opened() as client:
        pause = session_pb2.Pause()
        pause.timeout.FromMilliseconds(50)
        await client.write(Request(pause=pause))
        assert (await client.closed()).reason == session_pb2.CLOSE_REASON_PAUSE_TIMEOUT
        await rig.all_free()


async def test_a_full_context_gives_its_delta_and_then_closes() -> None:
    settings = session_pb2.Open(context_token_limit=30)
    async with running_worker() as rig, rig.opened(settings=settings) as client:
        for sequence in range(3):
            await client.send(unit(sequence))
        assert (await client.delta()).context_token_count == 19
        assert (await client.delta()).context_token_count == 31
        closed = await client.closed()
        assert closed.reason == session_pb2.CLOSE_REASON_CONTEXT_FULL
        assert closed.unit_count == 2


async def test_a_context_that_settle_fills_closes_without_a_fault_of_the_next_unit() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await client.send(unit(0))
        await client.delta()
        rig.model.answer = lambda unit, _: UnitFailure(unit.slot, "CONTEXT_FULL", "full", False)
        await client.send(unit(1))
        assert (await client.closed()).reason == session_pb2.CLOSE_REASON_CONTEXT_FULL
        await rig.all_free()


async def test_half_closing_ends_the_session() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await client.half_close()
        assert (await client.closed()).reason == session_pb2.CLOSE_REASON_CLIENT
        await rig.all_free()


async def test_a_client_that_cancels_in_mid_unit_frees_its_slot_and_harms_no_other() -> None:
    async with (
        running_worker() as rig,
        rig.opened(rig.grant(0)) as leaving,
        rig.opened(rig.grant(1)) as staying,
    ):
        rig.model.hold()
        await leaving.send(unit(0))
        await rig.model.held()
        await staying.send(unit(0))
        leaving.vanish()
        await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_CLEANING)
        assert (await refusal(rig, rig.grant(0))).reason is Reason.SLOT_OCCUPIED
        rig.model.let_go()
        await rig.all_free(0)
        assert (await staying.delta()).sequence == 0
        reported = [span for span in rig.spans.get_finished_spans() if span.name == WORKER_UNIT]
        assert [(span.attributes or {})[SLOT] for span in reported] == [1]
        async with rig.opened(rig.grant(0)) as next_:
            await next_.send(unit(0))
            assert (await next_.delta()).context_token_count == 19


async def test_a_client_whose_connection_breaks_frees_its_slot() -> None:
    async with running_worker() as rig:
        proxy = await _CuttingProxy.start(rig.address)
        channel = grpc.aio.insecure_channel(proxy.address)
        async with rig.call(channel) as client:
            await client.claim(rig.grant())
            await client.open(session_pb2.Open())
            rig.model.hold()
            await client.send(unit(0))
            await rig.model.held()
            await proxy.cut()
            await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_CLEANING)
            rig.model.let_go()
            await rig.all_free()
        await channel.close()


class _CuttingProxy:
    """Forwards TCP to a worker, until a test resets the connections without ending the calls."""

    def __init__(self) -> None:
        self.address = ""
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls, target: str) -> _CuttingProxy:
        proxy = cls()
        host, _, port = target.rpartition(":")

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(host, int(port))
            proxy._writers += [writer, back]
            for source, sink in ((reader, back), (there, writer)):
                proxy._tasks.add(asyncio.create_task(_copy(source, sink)))

        proxy._server = server = await asyncio.start_server(carry, "127.0.0.1", 0)
        bound = server.sockets[0].getsockname()
        proxy.address = f"127.0.0.1:{bound[1]}"
        return proxy

    async def cut(self) -> None:
        assert self._server
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.wait(self._tasks)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while received := await source.read(65536):
            sink.write(received)
            await sink.drain()
    except ConnectionError:
        pass


async def test_a_step_that_raises_ends_the_conversations_in_it_and_no_other() -> None:
    model = ScriptedModel(slot_count=3)

    def answer(unit_, length):
        if unit_.audio[0] == np.float32(0.7):
            raise RuntimeError("device-side assert")
        return answer_loud(unit_, length)

    model.answer = answer
    async with (
        running_worker(model) as rig,
        rig.opened(rig.grant(0)) as first,
        rig.opened(rig.grant(1)) as second,
        rig.opened(rig.grant(2)) as bystander,
    ):
        model.hold()
        await bystander.send(unit(0))
        await model.held()
        await first.send(unit(0, 0.1))
        await rig.received(2)  # the earlier unit is the first of the launch
        await second.send(unit(0, 0.7))
        await rig.received(3)
        model.let_go()
        assert (await first.delta()).sequence == 0
        for client in (first, second):
            closed = await client.closed()
            assert closed.reason == session_pb2.CLOSE_REASON_ENGINE_FAILED
            assert "assert" not in closed.message
        await rig.all_free(0, 1)
        assert (await bystander.delta()).sequence == 0
        await bystander.send(unit(1))
        assert (await bystander.delta()).sequence == 1


@pytest.mark.parametrize("is_fatal", [False, True])
async def test_a_unit_that_fails_ends_the_session_only_if_it_is_fatal(is_fatal: bool) -> None:
    async with running_worker() as rig, rig.opened() as client:
        rig.model.answer = lambda unit_, length: UnitFailure(
            unit_.slot, "AUDIO_TOO_SHORT", "0.1 s", is_fatal
        )
        await client.send(unit(0))
        failed = await client.failed()
        assert (failed.sequence, failed.reason) == (0, "AUDIO_TOO_SHORT")
        if is_fatal:
            closed = await client.closed()
            assert closed.reason == session_pb2.CLOSE_REASON_ENGINE_FAILED
        else:
            rig.model.answer = answer_loud
            await client.send(unit(1))
            assert (await client.delta()).sequence == 1


async def _broken(rig: Rig, client: Client) -> None:
    await client.end()
    await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_BROKEN)
    assert (await refusal(rig, rig.grant(0))).reason is Reason.SLOT_OCCUPIED
    async with rig.opened(rig.grant(1)) as other:  # the slots beside the broken one still work
        await other.send(unit(0))
        assert (await other.delta()).sequence == 0


async def test_a_slot_whose_cleanup_fails_is_broken() -> None:
    async with running_worker(is_broken_at_end=True) as rig, rig.opened() as client:

        def fail(slot: int) -> None:
            if slot == 0:
                raise RuntimeError("cannot")

        rig.model.on_close = fail
        await _broken(rig, client)


async def test_a_slot_that_is_not_clean_after_its_cleanup_is_broken() -> None:
    async with running_worker(is_broken_at_end=True) as rig, rig.opened() as client:
        rig.model.is_dirty = lambda slot: slot == 0
        await _broken(rig, client)


async def test_a_slot_after_whose_cleanup_memory_is_missing_is_broken() -> None:
    async with (
        running_worker(is_broken_at_end=True, memory_tolerance_bytes=1000) as rig,
        rig.opened() as client,
    ):

        def leak(slot: int) -> None:
            rig.model.memory_bytes = BASE_MEMORY_BYTES + (1001 if slot == 0 else 1000)

        rig.model.on_close = leak
        await _broken(rig, client)


def shout(unit_: Unit, length: int) -> UnitOutput:
    """Answer with more audio than gRPC buffers for a client that does not read."""
    audio = np.zeros(1_000_000, np.float32)
    return dataclasses.replace(answer_loud(unit_, length), is_listen=False, audio=audio)


@pytest.mark.timing
@pytest.mark.parametrize(
    ("limits", "unit_count"),
    [
        ({"outbox_message_count": 4, "stall_timeout_s": 100.0}, 12),
        ({"stall_timeout_s": 1.0}, 3),
    ],
    ids=["too much waits", "it waits too long"],
)
async def test_a_client_that_does_not_read_is_ended_and_another_is_answered(
    limits: dict[str, Any], unit_count: int
) -> None:
    async with (
        running_worker(**_limits(**limits, flush_timeout_s=0.1)) as rig,
        rig.opened(rig.grant(1)) as witness,
        rig.opened(rig.grant(0)) as client,
    ):
        rig.model.answer = lambda u, n: shout(u, n) if u.slot == 0 else answer_loud(u, n)
        await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_OCCUPIED)
        for sequence in range(unit_count):
            await client.send(unit(sequence))
            await witness.send(unit(sequence))
            assert (await witness.delta()).sequence == sequence
        await rig.all_free(0)
        assert (await client.refused()).reason is Reason.SLOW_CLIENT
        await witness.send(unit(unit_count))
        assert (await witness.delta()).sequence == unit_count


async def test_a_fault_of_our_own_ends_its_session_only_and_tells_no_internals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("secret")

    async with running_worker() as rig, rig.opened(rig.grant(1)) as other:
        async with rig.opened(rig.grant(0)) as client:
            with monkeypatch.context() as patch:
                patch.setattr("duplane.worker.session.duplex_call.check_unit", fail)
                await client.send(unit(0))
                error = await client.refused()
        assert error.reason is Reason.UNKNOWN
        assert "secret" not in error.message
        await rig.all_free(0)
        await other.send(unit(0))
        assert (await other.delta()).sequence == 0
