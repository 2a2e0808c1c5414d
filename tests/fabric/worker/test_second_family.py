"""A worker runs a family of models that is not part of duplane: the echo of the tests."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from support.echo_family import (
    INPUT_HERTZ,
    OUTPUT_HERTZ,
    PROMPT_ROWS,
    UNIT_ROWS,
    UNIT_S,
    UNIT_SAMPLES,
    EchoDevice,
)
from support.fabric.in_process import LocalWorker
from support.worker.fake_scheduler import FakeScheduler
from support.worker.worker_harness import Rig, running_worker

from duplane.fabric.process import Shutdown, StartError
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.service import serve
from duplane.worker.settings import WorkerSettings

SEEDED = session_pb2.Open(seed=3)


def unit(sequence: int, value: float, sample_count: int = UNIT_SAMPLES) -> session_pb2.Unit:
    audio = np.full(sample_count, value, "<f4").tobytes()
    return session_pb2.Unit(sequence=sequence, audio=audio)


def echoing() -> contextlib.AbstractAsyncContextManager[Rig]:
    return running_worker(device=EchoDevice(slot_count=2, context_capacity=8192))


async def test_a_worker_registers_the_record_of_the_family() -> None:
    async with echoing() as rig:
        model = rig.scheduler.registers[-1].model
        assert (model.name, model.digest) == ("echo", "echo-1")
        assert model.unit_duration.ToMilliseconds() == round(UNIT_S * 1e3)
        assert (model.input_rate_hertz, model.output_rate_hertz) == (INPUT_HERTZ, OUTPUT_HERTZ)
        assert not model.accepts_pictures
        assert list(rig.scheduler.registers[-1].kinds) == [lease_pb2.SESSION_KIND_AUDIO_DUPLEX]


async def test_units_have_the_length_and_the_rates_of_the_family() -> None:
    async with echoing() as rig, rig.opened() as client:
        await client.send(unit(0, 0.5))
        spoken = await client.delta()
        assert spoken.speech.sample_count == 2 * UNIT_SAMPLES
        assert len(spoken.speech.audio) == 4 * spoken.speech.sample_count
        assert spoken.context_token_count == PROMPT_ROWS + UNIT_ROWS
        assert not spoken.HasField("state_change")
        await client.send(unit(1, 0.0))
        assert (await client.delta()).HasField("listen")
        await client.send(unit(2, 0.5, 4200))
        failed = await client.failed()
        assert failed.reason == "UNIT_TOO_LONG"
        assert "lasts 0.175 s, more than 0.16 s" in failed.message


async def test_a_second_of_units_may_come_at_once() -> None:
    async with echoing() as rig, rig.opened() as client:
        for sequence in range(50):
            await client.send(unit(sequence, 0.5))
        deltas = [await client.delta() for _ in range(50)]
        assert [delta.sequence for delta in deltas] == list(range(50))
        assert not any(delta.dropped_unit_count for delta in deltas)


async def test_a_conversation_moves_between_two_workers() -> None:
    async with echoing() as rig, rig.opened(settings=SEEDED) as client:
        deltas: list[session_pb2.Delta] = []
        units = [unit(number, number / 100) for number in range(40)]
        for own in units:
            await client.send(own)
            deltas.append(await client.delta())
        past = [
            session_pb2.PastUnit(
                sequence=own.sequence,
                audio=own.audio,
                token_ids=delta.token_ids,
                rebuild_state=delta.rebuild_state,
                context_token_count=delta.context_token_count,
            )
            for own, delta in zip(units[:30], deltas[:30], strict=True)
        ]
        async with rig.opened(rig.grant(1), SEEDED) as moved:
            rebuild = session_pb2.Rebuild(units=past, is_last=True, model_digest="echo-1")
            await moved.write(session_pb2.ConverseRequest(rebuild=rebuild))
            assert (await moved.read()).rebuilt.sequence == 29
            for own, delta in zip(units[30:], deltas[30:], strict=True):
                await moved.send(own)
                assert (await moved.delta()).speech.text == delta.speech.text


async def test_the_module_of_a_family_is_named_by_a_flag(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    await scheduler.start()
    own = {"checkpoint": tmp_path, "family": "support.echo_family"}
    worker = LocalWorker(None, schedulers=(scheduler.address,), **own)
    await scheduler.until(lambda: bool(scheduler.registers))
    assert scheduler.registers[0].model.name == "echo"
    await worker.drain()
    await scheduler.stop()


@pytest.mark.parametrize(
    ("files", "family", "reason"),
    [
        ({}, "", "has no config.json"),
        ({"config.json": b"?"}, "", "cannot be read"),
        ({"config.json": b"[]"}, "", "cannot be read"),
        ({"config.json": b'{"model_type": "moshi"}'}, "", "type 'moshi'; duplane runs minicpmo"),
        ({"config.json": b'{"model_type": ["moshi"]}'}, "", r"type \['moshi'\]; duplane runs"),
        ({}, "no_such_family", "cannot be used"),
        ({}, "json", "cannot be used"),
    ],
)
async def test_a_checkpoint_without_a_family_ends_the_worker_with_its_reason(
    tmp_path: Path, files: dict[str, bytes], family: str, reason: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    own = WorkerSettings(checkpoint=tmp_path, family=family, schedulers=("127.0.0.1:1",))
    with pytest.raises(StartError, match=reason):
        await serve(own, Shutdown())
