"""The device thread with one lane and with two, with a model of which each part is a launch."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Literal

import pytest
from support.time_limits import WITHIN_S, until
from support.worker.engines import OPTIONS, Caller
from support.worker.parts_model import CHUNKS, PROMPT_ROWS, SPOKEN_IDS, Gate, PartsModel, past

from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.events import ChatStep, Lost
from duplane.worker.engine.schedule import Block
from duplane.worker.models.chat import ChatMessage, ChatOptions, ChatRequest, ChatRole, Finish
from duplane.worker.models.interface import DeviceLostError, Part
from duplane.worker.models.types import Opened, Rebuilt
from duplane.worker.settings import WorkerSettings

LANES = pytest.mark.parametrize("lane_count", [1, 2])
LISTENED = [Part.HEAR, Part.FEED]
SPOKEN = [*LISTENED, *[Part.DECODE] * SPOKEN_IDS, Part.TALK, *[Part.VOCODE] * CHUNKS]


@contextlib.asynccontextmanager
async def running(model: PartsModel, lane_count: Literal[1, 2]) -> AsyncGenerator[DeviceThread]:
    """Run a device thread, and check at the end that the model was called rightly."""
    model.constants = replace(model.constants, lane_count=lane_count)
    thread = DeviceThread(model, WorkerSettings(checkpoint="scripted"))
    await thread.start()
    try:
        yield thread
    finally:
        await thread.stop()
    assert model.violations == []


async def entered(gate: Gate) -> None:
    await asyncio.to_thread(gate.entered)


@LANES
async def test_a_unit_passes_all_its_parts_and_the_next_one_waits_until_it_has_settled(
    lane_count: Literal[1, 2],
) -> None:
    model = PartsModel()
    async with running(model, lane_count) as thread, Caller.open(thread) as caller:
        assert model.fed == [{0: 512}, {0: PROMPT_ROWS - 512}]
        await caller.send(0.5, frames=(b"1", b"2", b"3"))
        await caller.send()
        first, second = await caller.answer(), await caller.answer()
    whole = [
        *[Part.FEED] * 2,
        *[Part.HEAR, *[Part.SEE] * 2, *SPOKEN[1:], Part.SETTLE, Part.VOICE],
        *LISTENED,
    ]
    assert model.done[0][: len(whole)] == whole, "the session may end before its last settle"
    assert (first.output.is_listen, second.output.is_listen) == (False, True)
    assert first.record.batch_size == second.record.batch_size == 1
    for record in (first.record, second.record):
        assert record.received_s <= record.started_s < record.finished_s
        assert 0 < record.busy_s <= record.finished_s - record.started_s
    settle_s = second.record.settle_s
    assert settle_s[0] == first.record.finished_s < settle_s[1] <= second.record.started_s


@LANES
async def test_prompts_are_fed_in_parts_and_the_oldest_first(lane_count: Literal[1, 2]) -> None:
    model = PartsModel()
    async with running(model, lane_count) as thread:
        gate = model.on_launch = Gate(Block.OPEN)
        callers = [Caller(thread, slot) for slot in (2, 0, 1)]
        for caller in callers:
            prepared = await thread.prepare_conversation(caller.channel, OPTIONS)
            thread.open(caller.channel, prepared)
        await entered(gate)
        gate.open()
        for caller in callers:
            assert isinstance(await caller.event(), Opened)
            assert await thread.close(caller.channel)
    assert model.fed == [{2: 512}, {2: 188, 0: 324}, {0: 376, 1: 136}, {1: 512}, {1: 52}]


@LANES
async def test_a_prompt_that_fails_loses_its_conversation(lane_count: Literal[1, 2]) -> None:
    model = PartsModel()
    async with running(model, lane_count) as thread:
        model.fails[0, Part.FEED] = False
        caller = Caller(thread)
        thread.open(caller.channel, await thread.prepare_conversation(caller.channel, OPTIONS))
        assert isinstance(await caller.event(), Lost)
        assert await thread.close(caller.channel)


@LANES
async def test_units_of_several_conversations_share_their_launches(
    lane_count: Literal[1, 2],
) -> None:
    model = PartsModel()
    async with (
        running(model, lane_count) as thread,
        Caller.open(thread, 0) as first,
        Caller.open(thread, 1) as second,
        Caller.open(thread, 2) as other,
    ):
        gate = model.on_launch = Gate(Block.BEGIN)
        await other.send()
        await entered(gate)
        await first.send(0.5)
        await second.send(0.5)
        model.launches.clear()
        gate.open()
        records = [(await caller.answer()).record for caller in (first, second, other)]
    assert (Block.BEGIN, (0, 1)) in model.launches
    assert (Block.HEAR, (2, 0, 1)) in model.launches
    assert (Block.PASS, (2, 0, 1)) in model.launches
    assert (Block.TALK, (0, 1)) in model.launches
    assert (Block.VOCODE, (0, 1)) in model.launches
    assert [record.batch_size for record in records] == [3, 3, 3]


@LANES
@pytest.mark.parametrize("part", [Part.HEAR, Part.SEE, Part.FEED, Part.DECODE, Part.TALK])
async def test_a_failure_between_parts_ends_the_unit_and_only_a_fatal_one_its_conversation(
    part: Part, lane_count: Literal[1, 2]
) -> None:
    model = PartsModel()
    async with (
        running(model, lane_count) as thread,
        Caller.open(thread, 0) as caller,
        Caller.open(thread, 1) as other,
    ):
        model.fails[0, part] = False
        await caller.send(0.5, frames=(b"1",))
        await caller.send()
        await other.send(0.5)
        assert not (await caller.failure()).is_fatal
        assert (await caller.answer()).record.sequence == 1
        await other.answer()
        model.fails[0, part] = True
        await caller.send(0.5, frames=(b"1",))
        await caller.send()
        assert (await caller.failure()).is_fatal
        await other.send(0.5)
        await other.answer()
        assert caller.events.empty(), "the conversation takes no more units"


@LANES
@pytest.mark.parametrize("block", [Block.PASS, Block.VOCODE, Block.SETTLE, Block.VOICE])
async def test_a_launch_that_raises_loses_its_conversations_and_no_other(
    block: Block, lane_count: Literal[1, 2]
) -> None:
    model = PartsModel()

    def fail(launched: Block, slots: tuple[int, ...]) -> None:
        if launched is block and 0 in slots:
            raise RuntimeError("as the test wants")

    async with (
        running(model, lane_count) as thread,
        Caller.open(thread, 0) as caller,
        Caller.open(thread, 1) as other,
    ):
        await other.send(0.5)
        await other.answer()
        model.on_launch = fail
        await caller.send(0.5)
        if block in (Block.SETTLE, Block.VOICE):
            await caller.answer()
        assert isinstance(await caller.event(), Lost)
        await other.send(0.5)
        await other.answer()


@LANES
@pytest.mark.parametrize("block", [Block.HEAR, Block.TALK])
async def test_a_session_that_ends_amid_a_unit_leaves_a_clean_slot(
    block: Block, lane_count: Literal[1, 2]
) -> None:
    model = PartsModel()
    async with running(model, lane_count) as thread:
        caller = Caller(thread)
        thread.open(caller.channel, await thread.prepare_conversation(caller.channel, OPTIONS))
        await caller.event()
        gate = model.on_launch = Gate(block)
        await caller.send(0.5)
        await entered(gate)
        closing = asyncio.create_task(thread.close(caller.channel))
        await asyncio.sleep(0)
        gate.open()
        assert await closing
        assert model.done[0][-1].value == block.value, "no later part runs"
        async with Caller.open(thread) as following:
            await following.send()
            assert (await following.answer()).record.sequence == 0


async def test_one_conversation_speaks_while_another_thinks() -> None:
    model = PartsModel()
    async with (
        running(model, 2) as thread,
        Caller.open(thread, 0) as speaking,
        Caller.open(thread, 1) as thinking,
    ):
        gate = model.on_launch = Gate(Block.TALK)
        await speaking.send(0.5)
        await entered(gate)
        for _ in range(2):
            await thinking.send()
            await thinking.answer()
        assert speaking.events.empty()
        gate.open()
        await speaking.answer()


@pytest.mark.parametrize("work", ["open", "rebuild", "close"])
async def test_what_needs_both_lanes_waits_for_the_launch_of_the_other_one(work: str) -> None:
    """While it waits, the other lane begins no launch."""
    model = PartsModel()
    async with (
        running(model, 2) as thread,
        Caller.open(thread, 0) as speaking,
        Caller.open(thread, 1) as other,
    ):
        gate = model.on_launch = Gate(Block.TALK)
        await speaking.send(0.5)
        await entered(gate)
        third, closing = Caller(thread, 2), None
        match work:
            case "open":
                prepared = await thread.prepare_conversation(third.channel, OPTIONS)
                thread.open(third.channel, prepared)
            case "rebuild":
                thread.rebuild(other.channel, [past(1)])
            case _:
                closing = asyncio.create_task(thread.close(third.channel))
        await reserved(thread)
        assert speaking.events.empty()
        count = len(model.launches)
        gate.open()
        if work == "rebuild":
            assert isinstance(await other.event(), Rebuilt)
        elif work == "open":
            await third.event()
        await speaking.answer()
        if closing is None:
            assert model.launches[count][0].value == work
            closing = thread.close(third.channel)
        assert await closing


async def reserved(thread: DeviceThread) -> None:
    """Wait until the first lane waits for the second one."""

    async def is_reserved() -> bool:
        return thread._is_reserved

    await until(is_reserved, WITHIN_S)


@pytest.mark.parametrize("block", [Block.PASS, Block.TALK])
async def test_a_lane_that_loses_the_device_ends_both(block: Block) -> None:
    model = PartsModel()

    def fail(launched: Block, slots: tuple[int, ...]) -> None:
        if launched is block:
            model.error = RuntimeError("CUDA error")
            raise RuntimeError("as the test wants")

    async with running(model, 2) as thread:
        caller = Caller(thread)
        thread.open(caller.channel, await thread.prepare_conversation(caller.channel, OPTIONS))
        await caller.event()
        model.on_launch = fail
        await caller.send(0.5)
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(DeviceLostError, match="CUDA error"):
                await asyncio.shield(thread.ended)
    assert not any(each.name in ("device", "speech") for each in threading.enumerate())


async def test_of_two_calls_the_older_one_counts_as_busy() -> None:
    model = PartsModel()
    async with (
        running(model, 2) as thread,
        Caller.open(thread, 0) as speaking,
        Caller.open(thread, 1) as thinking,
    ):
        talks, hears = Gate(Block.TALK), Gate(Block.HEAR)
        model.on_launch = talks
        await speaking.send(0.5)
        await entered(talks)
        since_s = thread.busy_since_s
        model.on_launch = hears
        await thinking.send()
        await entered(hears)
        assert thread.busy_since_s == since_s
        talks.open()
        await speaking.answer()
        assert since_s is not None
        assert thread.busy_since_s is not None
        assert thread.busy_since_s > since_s
        hears.open()
        await thinking.answer()


@LANES
async def test_a_chat_runs_beside_conversations_and_keeps_its_order(
    lane_count: Literal[1, 2],
) -> None:
    model = PartsModel()
    async with running(model, lane_count) as thread, Caller.open(thread, 1) as other:
        caller = Caller(thread)
        message = ChatMessage(ChatRole.USER, ("one two",))
        chat = await thread.prepare_chat(caller.channel, ChatRequest((message,), ChatOptions()))
        thread.open_chat(caller.channel, chat, credit=2)
        steps = [await caller.event(), await caller.event()]
        await other.send(0.5)
        await other.answer()
        assert caller.events.empty(), "it has no credit"
        thread.return_credit(caller.channel)
        steps.append(await caller.event())
        outputs = [step.output for step in steps if isinstance(step, ChatStep)]
        assert [output.text for output in outputs] == ["", "one ", "two "]
        assert outputs[-1].finish is Finish.STOP
        assert await thread.close(caller.channel)


@LANES
@pytest.mark.parametrize("seed", range(3))
async def test_many_conversations_come_and_go_and_each_unit_is_answered_once_in_order(
    seed: int, lane_count: Literal[1, 2]
) -> None:
    model = PartsModel(slot_count=6)
    async with running(model, lane_count) as thread, asyncio.TaskGroup() as tasks:
        for slot in range(6):
            tasks.create_task(converse(thread, slot, random.Random(f"{seed}/{slot}")))


async def converse(thread: DeviceThread, slot: int, draw: random.Random) -> None:
    for _ in range(3):
        async with Caller.open(thread, slot) as caller:
            if draw.random() < 0.5:
                thread.rebuild(caller.channel, [past(number) for number in range(5)])
                assert isinstance(await caller.event(), Rebuilt)
            for _ in range(4):
                count = draw.randint(1, 3)
                first = caller.sent
                for _ in range(count):
                    frames = (b"picture",) * draw.choice((0, 0, 5))
                    await caller.send(draw.choice((0.0, 0.5)), frames=frames)
                answers = [await caller.answer() for _ in range(count)]
                numbers = [answer.record.sequence for answer in answers]
                assert numbers == [*range(first, first + count)]
            await caller.send(0.5)  # the session ends meanwhile
