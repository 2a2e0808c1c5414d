"""Both engines of a worker, the device thread and the engine process, do the same."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.echo_family import OUTPUT_HERTZ, UNIT_SAMPLES
from support.test_checkpoint.build import build_test_checkpoint
from support.time_limits import WITHIN_S
from support.worker.engines import KINDS, OPTIONS, Caller, Kind, running_engine

from duplane.fabric.v1.trace_pb2 import TraceContext
from duplane.worker.engine.engine import AnyEngine
from duplane.worker.engine.events import (
    AnsweredUnit,
    ChatStep,
    DroppedUnit,
    FailedUnit,
    RebuildRefused,
)
from duplane.worker.engine.unit_record import LaunchRecord, UnitRecord
from duplane.worker.models.chat import (
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatOutput,
    ChatRequest,
    ChatRole,
    Finish,
)
from duplane.worker.models.scripted.model import SPEECH, Mark
from duplane.worker.models.types import DecodeMode, PastUnit, Rebuilt, SpeechRequest, Unit
from duplane.worker.settings import ScriptSettings

pytestmark = pytest.mark.timing

UNIT_S = 0.05
SCRIPT = ScriptSettings(scripted_unit_s=UNIT_S)
PICTURE = b"picture"
_encoded = io.BytesIO()
Image.new("RGB", (320, 240), (10, 200, 90)).save(_encoded, "JPEG")
JPEG = _encoded.getvalue()


@pytest.fixture(scope="module", params=KINDS)
async def engine(request: pytest.FixtureRequest) -> AsyncGenerator[AnyEngine]:
    async with running_engine(request.param, script=SCRIPT) as engine:
        yield engine


def past(number: int, *, context_length: int) -> PastUnit:
    audio = np.zeros(16_000, np.float32)
    unit = Unit(0, audio, sequence=number, rows=12)
    return PastUnit(unit, (1,), b"", context_length)


async def test_constants_and_device_are_those_of_the_model(engine: AnyEngine) -> None:
    assert (engine.constants.name, engine.constants.slot_count) == ("scripted", 4)
    assert engine.description.name == "scripted"
    assert engine.memory_used_bytes == 0


async def test_units_are_answered_in_order_with_their_own_records(engine: AnyEngine) -> None:
    trace = TraceContext(traceparent="00-1-2-01")
    async with Caller.open(engine) as caller:
        for value in (0.0, 0.5):
            audio = np.full(16_000, value, np.float32)
            unit = Unit(0, audio, frames=(PICTURE,), sequence=caller.sent)
            record = UnitRecord(unit, time.monotonic(), 7, 8, trace)
            caller.sent += 1
            prepared = await engine.prepare_unit(caller.channel, record)
            engine.put(caller.channel, prepared)
        silent, loud = await caller.answer(), await caller.answer()
    assert (silent.output.is_listen, loud.output.is_listen) == (True, False)
    assert np.array_equal(loud.output.audio, SPEECH)
    for number, answered in enumerate((silent, loud)):
        record = answered.record
        assert (record.sequence, record.receive_time_ns, record.edge_time_ns) == (number, 7, 8)
        assert record.trace == trace
        assert (record.sample_count, record.unit.rows) == (16_000, 24)
        assert (record.unit.audio.size, record.unit.frames) == (0, ())


async def test_times_of_a_unit_are_in_order_on_one_clock(engine: AnyEngine) -> None:
    records: list[UnitRecord] = []
    async with Caller.open(engine) as caller:
        for _ in range(2):
            before_s = time.monotonic()
            await caller.send()
            record = (await caller.answer()).record
            times_s = (
                *(before_s, record.received_s, record.queued_s, record.started_s),
                *(record.finished_s, time.monotonic()),
            )
            assert sorted(times_s) == list(times_s)
            assert record.finished_s - record.started_s >= UNIT_S
            records.append(record)
    _, second = records
    assert 0 < second.settle_s[0] <= second.settle_s[1] <= second.started_s


async def test_launches_are_reported_and_units_have_the_size_of_theirs(engine: AnyEngine) -> None:
    reports = asyncio.Queue[Sequence[LaunchRecord]]()
    engine.on_launches = reports.put_nowait
    async with Caller.open(engine, 0) as first, Caller.open(engine, 1) as second:
        await first.send()
        await first.send()
        await second.send()  # it runs together with the first unit, or with the one after it
        records = [(await caller.answer()).record for caller in (first, second, first)]
        reported: list[LaunchRecord] = []
        async with asyncio.timeout(WITHIN_S):
            while sum(launch.block == "begin" for launch in reported) < 2:
                reported += await reports.get()
    engine.on_launches = lambda _: None
    assert [launch.size for launch in reported if launch.block == "open"] == [1, 1]
    begun = [launch for launch in reported if launch.block == "begin"]
    assert sorted(launch.size for launch in begun) == [1, 2]
    assert all(launch.seconds >= UNIT_S for launch in begun)
    assert sorted(record.batch_size for record in records) == [1, 2, 2]
    assert all(UNIT_S <= record.busy_s <= record.finished_s for record in records)


async def test_full_inbox_drops_the_oldest_unit_and_its_interruption_is_kept(
    engine: AnyEngine,
) -> None:
    async with Caller.open(engine) as caller:
        for number in range(8):  # the first one runs, or is dropped, too
            await caller.send(0.5, force_listen=number in (1, 2))
        events = [await caller.event() for _ in range(8)]
        dropped = [event.entry for event in events if isinstance(event, DroppedUnit)]
        answered = [event for event in events if isinstance(event, AnsweredUnit)]
        assert len(dropped) == caller.channel.dropped_count >= 3
        assert all(isinstance(entry, UnitRecord) and entry.sample_count for entry in dropped)
        assert answered[-1].record.dropped_count == len(dropped)
        kept = [event.record.sequence for event in answered]
        assert kept[-4:] == [4, 5, 6, 7]
        assert answered[-4].output.is_forced, "unit 4 has the flag of the units before it"
        assert not answered[-3].output.is_forced


async def test_answer_to_a_refused_unit_keeps_its_place(engine: AnyEngine) -> None:
    async with Caller.open(engine) as caller:
        await caller.send()
        refused = FailedUnit(1, "INVALID_FIELD", "no", "audio", 5, TraceContext(traceparent="t"))
        engine.put(caller.channel, refused)
        caller.sent += 1
        await caller.send()
        assert (await caller.answer()).record.sequence == 0
        assert await caller.event() == refused
        assert (await caller.answer()).record.sequence == 2


async def test_session_that_ends_drops_its_units_and_leaves_a_clean_slot(
    engine: AnyEngine,
) -> None:
    caller = Caller(engine)
    engine.open(caller.channel, await engine.prepare_conversation(caller.channel, OPTIONS))
    await caller.event()
    for _ in range(3):
        await caller.send()
    assert await engine.close(caller.channel)
    assert caller.channel.dropped_count >= 2
    await caller.send()
    engine.return_credit(caller.channel)
    async with Caller.open(engine) as following:
        await following.send()
        assert (await following.answer()).record.sequence == 0
        assert following.events.empty()


async def test_slot_has_one_channel_at_a_time(engine: AnyEngine) -> None:
    caller = Caller(engine)
    with pytest.raises(ValueError, match="slot 0 is in use"):
        engine.attach(0, lambda event: None)
    assert await engine.close(caller.channel)
    assert await engine.close_again(0)


async def test_poisoned_unit_ends_only_its_conversation(engine: AnyEngine) -> None:
    async with Caller.open(engine, 1) as other:
        caller = Caller(engine)
        engine.open(caller.channel, await engine.prepare_conversation(caller.channel, OPTIONS))
        await caller.event()
        await caller.send(Mark.FAILED_UNIT.value, speech=(SpeechRequest(3, "Hi."),))
        await other.send()
        failed = await caller.failure()
        assert (failed.sequence, failed.is_fatal) == (0, True)
        assert failed.record
        assert failed.record.sample_count == 16_000
        assert failed.record.unit.speech[0].number == 3
        await other.answer()
        assert await engine.close(caller.channel)
        await other.send()
        await other.answer()


async def test_rebuild_is_answered_when_its_units_are_rebuilt(engine: AnyEngine) -> None:
    async with Caller.open(engine) as caller:
        units = [past(number, context_length=7 + 12 * (number + 1)) for number in range(6)]
        engine.rebuild(caller.channel, units[:3], has_more=True)
        assert isinstance(await caller.event(), Rebuilt)
        engine.rebuild(caller.channel, units[3:])
        rebuilt = await caller.event()
        assert isinstance(rebuilt, Rebuilt)
        assert (rebuilt.context_length, rebuilt.is_complete) == (79, True)
        await caller.send()
        assert (await caller.answer()).output.context_length == 91
        engine.rebuild(caller.channel, [replace(units[0], context_length=1)])
        assert isinstance(await caller.event(), RebuildRefused)


async def test_chat_waits_for_credit(engine: AnyEngine) -> None:
    caller = Caller(engine)
    message = ChatMessage(ChatRole.USER, ("one two",))
    request = ChatRequest((message,), ChatOptions())
    prepared = await engine.prepare_chat(caller.channel, request)
    engine.open_chat(caller.channel, prepared, credit=2)
    steps = [await caller.event(), await caller.event()]
    async with Caller.open(engine, 1) as other:  # a later round has no step of the chat
        await other.send()
        await other.answer()
    assert caller.events.empty()
    for _ in range(2):
        engine.return_credit(caller.channel)
        steps.append(await caller.event())
    outputs = [step.output for step in steps if isinstance(step, ChatStep)]
    assert "".join(output.text for output in outputs) == "one two "
    assert outputs[-1].finish is Finish.STOP
    assert await engine.close(caller.channel)


@pytest.mark.parametrize("kind", KINDS)
async def test_family_beyond_duplane_runs_in_both(kind: Kind, tmp_path: Path) -> None:
    family = {"checkpoint": tmp_path, "family": "support.echo_family"}
    async with running_engine(kind, **family) as engine, Caller.open(engine) as caller:
        await caller.send(0.5, UNIT_SAMPLES)
        output = (await caller.answer()).output
        assert output.audio.size == UNIT_SAMPLES * OUTPUT_HERTZ // 24_000
        assert np.all(output.audio == 0.5)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_model_in_parts_runs_in_both_with_one_lane_and_with_two(
    kind: Kind, tmp_path: Path, lanes: int
) -> None:
    family = {
        "checkpoint": tmp_path,
        "family": "support.worker.parts_model",
        "lanes": lanes,
    }
    async with (
        running_engine(kind, **family) as engine,
        Caller.open(engine, 0) as first,
        Caller.open(engine, 1) as second,
    ):
        for value in (0.5, 0.0, 0.5):
            for caller in (first, second):
                await caller.send(value, frames=(PICTURE,))
        for number in range(3):
            for caller in (first, second):
                answered = await caller.answer()
                assert answered.record.sequence == number
                assert answered.output.is_listen == (number == 1)
                assert answered.record.busy_s > 0
                assert answered.record.batch_size in (1, 2)


@pytest.mark.slow
async def test_torch_model_gives_the_same_in_both(tmp_path: Path) -> None:
    """The units have sound and pictures; the chat has a picture, and is answered in speech."""
    directory = tmp_path / "checkpoint"
    build_test_checkpoint(directory)
    answers: list[list[tuple[tuple[int, ...], str, int]]] = []
    memory: list[int] = []
    for kind in KINDS:
        own: list[tuple[tuple[int, ...], str, int]] = []
        settings = {"checkpoint": directory, "slot_count": 2, "context_token_limit": 1024}
        async with (
            running_engine(kind, threads=1, **settings) as engine,
            Caller.open(engine) as caller,
        ):
            for frames in ((), (), (JPEG,)):
                await caller.send(0.1 * len(own), frames=frames)
                output = (await caller.answer()).output
                own.append((output.token_ids, output.text, output.input_video_count))
                assert output.stage_s["prefill"] > 0
            own += [(each.token_ids, each.text, each.audio.size) for each in await chat(engine)]
            memory.append(engine.memory_used_bytes)
        answers.append(own)
    assert answers[0] == answers[1]
    assert answers[0][2][2], "the model has seen the picture"
    assert any(size for *_, size in answers[0][3:]), "the chat is spoken"
    assert memory[0] == memory[1] > 0


async def chat(engine: AnyEngine) -> list[ChatOutput]:
    """Return the steps of the answer to a chat in slot 1."""
    caller = Caller(engine, 1)
    message = ChatMessage(ChatRole.USER, (ChatImage(JPEG), "What is this?"))
    options = ChatOptions(
        decode_mode=DecodeMode.GREEDY, max_new_tokens=20, generate_audio=True, seed=1
    )
    prepared = await engine.prepare_chat(caller.channel, ChatRequest((message,), options))
    engine.open_chat(caller.channel, prepared, credit=100)
    outputs: list[ChatOutput] = []
    while not outputs or outputs[-1].finish is None:
        step = await caller.event()
        assert isinstance(step, ChatStep), step
        outputs.append(step.output)
    assert await engine.close(caller.channel)
    return outputs
