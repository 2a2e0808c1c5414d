"""The model runner without its thread: its launches, and its handling of failures of the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
from support.worker.scripted_model import (
    ScriptedChat,
    ScriptedConversation,
    ScriptedModel,
    answer_loud,
)

from duplane.worker.engine.events import (
    AnsweredUnit,
    ChatStep,
    Event,
    FailedUnit,
    Lost,
    RebuildRefused,
)
from duplane.worker.engine.inbox import Inbox
from duplane.worker.engine.model_runner import ModelRunner
from duplane.worker.engine.schedule import Limits, next_single
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.chat import ChatAudio, ChatImage, ChatOutput, ChatRequest
from duplane.worker.models.interface import (
    Continue,
    DeviceLostError,
    Item,
    Open,
    Part,
    Ready,
    Result,
    StartChat,
)
from duplane.worker.models.minicpm_o.vision.pixels import decode_image
from duplane.worker.models.types import (
    ConversationOptions,
    Opened,
    OptionError,
    PastUnit,
    Rebuilt,
    Unit,
    UnitFailure,
    UnitOutput,
)


class Log:
    """A runner of a scripted model, and all events that it has posted."""

    def __init__(self, *slots: int, model: ScriptedModel | None = None) -> None:
        self.model = model or ScriptedModel(slot_count=4)
        self.events: list[tuple[int, Event]] = []
        self.channels: dict[int, SlotChannel] = {}
        self.runner = ModelRunner(
            self.model,
            100,
            self.channels,
            lambda channel, event: self.events.append((channel.slot, event)),
            threading.Condition(),
        )
        self.runner.warm_up()
        for slot in slots:
            self.open(slot)
            self.run()
        assert [type(event) for _, event in self.events] == [Opened] * len(slots)
        self.events.clear()

    def attach(self, slot: int) -> SlotChannel:
        return self.channels.setdefault(slot, SlotChannel(slot, Inbox(), lambda event: None))

    def open(self, slot: int) -> None:
        channel = self.attach(slot)
        channel.begin(
            Open(slot, ScriptedConversation(ConversationOptions())), 0, len(self.channels)
        )

    def chat(self, slot: int) -> None:
        channel = self.attach(slot)
        channel.begin(StartChat(slot, ScriptedChat(ChatRequest(()), 1)), 1, len(self.channels))

    def run(self) -> None:
        """Run all launches until no slot has work."""
        while True:
            waiting = [work for channel in self.channels.values() if (work := channel.work())]
            launch = next_single(waiting, Limits(), 0.0, is_shared=False, has_seen=False)
            if launch is None:
                return
            for item in launch.items:
                self.channels[item.slot].run(item, len(launch.items), 0.0)
            self.runner.advance(launch)
            for item in launch.items:
                self.channels[item.slot].end_run(0.0, 0.0)

    def run_units(self, units: Sequence[Unit]) -> set[int]:
        """Run these units. Return the slots that then take no more units."""
        before = {slot for slot, channel in self.channels.items() if channel.is_ready}
        for unit in units:
            self.channels[unit.slot].inbox.put(UnitRecord(unit))
        self.run()
        return {slot for slot in before if not self.channels[slot].is_ready}

    def close(self, slot: int) -> bool:
        self.channels.pop(slot, None)
        return self.runner.close(slot)

    def kinds(self) -> list[tuple[int, type]]:
        return [(slot, type(event)) for slot, event in self.events]


def runner_of(model: ScriptedModel) -> ModelRunner:
    runner = ModelRunner(model, 100, {}, lambda channel, event: None, threading.Condition())
    runner.warm_up()
    return runner


def taken(slot: int, value: float = 0.0) -> Unit:
    return Unit(slot, np.full(4, value, np.float32))


async def test_the_warm_up_leaves_no_conversation() -> None:
    log = Log()
    assert log.model.is_clean(0)
    assert log.model.rounds == [(0,)] * 3
    assert log.model.order == ["units"] * 3 + ["chat"] * 3
    request = log.model.chats[0]
    assert [type(part) for part in request.messages[0].parts] == [ChatImage, ChatAudio, str]
    assert request.options.generate_audio


async def test_a_device_that_plans_batches_runs_each_size_before_it_serves() -> None:
    model = ScriptedModel(slot_count=6)
    model.constants = replace(model.constants, plans_batches=True)
    spoken: list[int] = []

    def answer(unit: Unit, length: int) -> UnitOutput:
        spoken.extend(unit.slot for _ in unit.speech)
        return answer_loud(unit, length)

    model.answer = answer
    runner_of(model)
    sizes = (1, 1, 2, 4, 6)  # the first conversation, then each size
    assert model.rounds == [tuple(range(size)) for size in sizes for _ in range(3)]
    assert spoken == [slot for size in sizes[1:] for slot in range(size)]
    assert all(model.is_clean(slot) for slot in range(6))


async def test_a_model_without_a_voice_is_tried_in_words() -> None:
    def refuse(request: ChatRequest) -> None:
        if request.options.generate_audio:
            raise OptionError("generate_audio", "is not possible")

    model = ScriptedModel()
    model.on_prepare = refuse
    runner_of(model)
    assert not model.chats[0].options.generate_audio
    assert model.is_clean(0)


async def test_a_model_that_does_not_chat_is_not_asked_to() -> None:
    model = ScriptedModel()
    model.constants = replace(model.constants, has_chat=False)
    runner_of(model)
    assert model.chats == {}


async def test_a_model_that_fails_on_a_chat_never_gets_ready() -> None:
    def fail(slot: int, request: ChatRequest) -> Iterator[ChatOutput | UnitFailure]:
        yield UnitFailure(slot, "NOT_FINITE", "the logits are not finite", is_fatal=True)

    model = ScriptedModel()
    model.on_chat = fail
    with pytest.raises(RuntimeError, match="fails on a chat"):
        runner_of(model)


async def test_outputs_are_posted_as_they_come_and_all_is_settled() -> None:
    log = Log(0, 2)
    assert log.run_units([taken(0), taken(2, 0.5)]) == set()
    assert log.kinds() == [(0, AnsweredUnit), (2, AnsweredUnit)]
    records = [event.record for _, event in log.events if isinstance(event, AnsweredUnit)]
    assert [record.batch_size for record in records] == [2, 2]
    assert log.run_units([taken(0), taken(2)]) == set()
    assert log.model.violations == []


async def test_a_step_that_raises_loses_all_its_conversations() -> None:
    log = Log(0, 1, 2)

    def answer(unit: Unit, length: int) -> UnitOutput:
        if unit.slot == 1:
            raise RuntimeError("no")
        return answer_loud(unit, length)

    log.model.answer = answer
    assert log.run_units([taken(0), taken(1)]) == {0, 1}
    assert log.kinds() == [(0, AnsweredUnit), (0, Lost), (1, Lost)]
    assert log.run_units([taken(2)]) == set()


async def test_a_unit_that_is_left_without_an_answer_loses_the_round() -> None:
    log = Log(0, 1)
    step = log.model.step

    def forget(units: Sequence[Unit]) -> Iterator[UnitOutput | UnitFailure]:
        yield from step(units[:1])

    log.model.step = forget
    assert log.run_units([taken(0), taken(1)]) == {0, 1}


async def test_a_unit_that_is_only_ready_is_lost() -> None:
    log = Log(0)
    log.model.advance = lambda items: iter([Ready(0)])
    assert log.run_units([taken(0)]) == {0}
    assert log.kinds() == [(0, Lost)]


async def test_a_result_of_a_slot_without_an_item_reaches_no_other_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log(0, 1, 2)

    def advance(items: Sequence[Item]) -> Iterator[Result]:
        yield UnitFailure(2, "NOT_FINITE", "no", is_fatal=True)

    log.model.advance = advance
    assert log.run_units([taken(0), taken(1)]) == {0, 1}
    assert sorted(log.kinds(), key=str) == [(0, Lost), (1, Lost)]
    assert "slot 2 has a result, UnitFailure, but no item" in caplog.text


@pytest.mark.parametrize("work", ["open", "prompt", "start_chat", "chat", "voice", "rebuild"])
async def test_work_without_a_result_is_lost(work: str, caplog: pytest.LogCaptureFixture) -> None:
    log = Log(0)
    match work:
        case "open":
            log.open(0)
        case "prompt":
            log.channels[0].next = Continue(0, Part.FEED, 5)
        case "start_chat":
            log.chat(0)
        case "chat":
            log.chat(0)
            log.channels[0].next = Continue(0, Part.DECODE, 1)
        case "voice":
            log.channels[0].next = Continue(0, Part.VOICE, 5)
        case _:
            log.channels[0].past_units = []
    log.model.advance = lambda items: iter(())
    log.run()
    assert log.kinds() == [(0, Lost)]
    assert "slots [0] have neither an outcome nor work left" in caplog.text
    log.run()
    assert log.kinds() == [(0, Lost)], "the work is not repeated"


async def test_a_chat_that_neither_ends_nor_continues_is_lost() -> None:
    log = Log()
    log.chat(0)
    log.model.chat_step = lambda slots: iter([ChatOutput(0, 1)])
    log.run()
    assert log.kinds() == [(0, ChatStep), (0, Lost)]


async def test_an_output_without_a_unit_is_lost() -> None:
    log = Log(0)
    log.channels[0].next = Continue(0, Part.SETTLE, 1)
    log.model.advance = lambda items: iter([answer_loud(taken(0), 1)])
    log.run()
    assert log.kinds() == [(0, Lost)]


async def test_a_session_that_ends_amid_its_work_is_not_lost() -> None:
    log = Log()
    log.open(0)

    def end(slot: int, options: ConversationOptions) -> None:
        log.channels[0].is_muted = True

    log.model.on_open = end
    log.run()
    assert log.kinds() == [(0, Opened)]
    assert not log.channels[0].is_ready


async def test_a_rebuild_that_takes_no_unit_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(0)
    log.channels[0].past_units = [PastUnit(taken(0), (), b"", 0)]
    log.model.rebuild = lambda slot, units: Rebuilt(slot, 0, 7, is_complete=False)
    log.run()
    assert log.kinds() == [(0, Lost)]
    assert "has rebuilt 0 of 1 past units" in caplog.text


async def test_the_log_of_a_failure_names_the_work(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(0)
    log.channels[0].past_units = [PastUnit(taken(0), (), b"", 0)]
    log.run()
    assert "slot 0: Rebuild failed: REBUILD_REFUSED, past unit 0 has no ids" in caplog.text

    def fail(items: Sequence[Item]) -> Iterator[Result]:
        raise RuntimeError("no")

    log.model.advance = fail
    log.channels[0].next = Continue(0, Part.VOICE, 1)
    log.run()
    assert "a call failed: Continue voice of slot 0" in caplog.text


async def test_a_settle_that_raises_loses_the_round() -> None:
    log = Log(0)

    def fail(slots: Sequence[int]) -> list[UnitFailure]:
        raise RuntimeError("no")

    log.model.settle = fail
    assert log.run_units([taken(0)]) == {0}
    assert log.kinds() == [(0, AnsweredUnit), (0, Lost)]


async def test_a_slot_that_cannot_be_settled_is_lost_and_no_other() -> None:
    log = Log(0, 1)
    log.model.settle = lambda slots: [UnitFailure(1, "STAGE_FAILED", "no", True)]
    assert log.run_units([taken(0), taken(1)]) == {1}
    assert log.kinds() == [(0, AnsweredUnit), (1, AnsweredUnit), (1, Lost)]


@pytest.mark.parametrize("is_fatal", [False, True])
async def test_only_a_fatal_failure_loses_its_conversation(is_fatal: bool) -> None:
    log = Log(0, 1)

    def answer(unit: Unit, length: int) -> UnitOutput | UnitFailure:
        if unit.slot == 1:
            return UnitFailure(1, "NOT_FINITE", "no", is_fatal)
        return answer_loud(unit, length)

    log.model.answer = answer
    assert log.run_units([taken(0), taken(1)]) == ({1} if is_fatal else set())
    assert log.kinds() == [(0, AnsweredUnit), (1, FailedUnit)]


async def test_an_open_that_raises_is_reported() -> None:
    log = Log()

    def fail(slot: int, options: ConversationOptions) -> None:
        raise MemoryError

    log.model.on_open = fail
    log.open(1)
    log.run()
    assert log.kinds() == [(1, Lost)]
    log.model.on_open = lambda slot, options: None
    assert log.close(1)
    log.open(1)
    log.run()
    assert log.kinds()[-1] == (1, Opened)


async def test_a_rebuild_that_is_refused_loses_its_conversation() -> None:
    log = Log(0)
    log.channels[0].past_units = [PastUnit(taken(0), (), b"", 0)]
    assert log.run_units([]) == {0}
    assert log.kinds() == [(0, RebuildRefused)]


def break_device(log: Log) -> None:
    log.model.device_error = RuntimeError("CUDA error: an illegal memory access")


async def test_a_step_that_raises_on_a_lost_device_ends_the_thread() -> None:
    log = Log(0, 1)

    def answer(unit: Unit, length: int) -> UnitOutput:
        break_device(log)
        raise RuntimeError("CUDA error")

    log.model.answer = answer
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        log.run_units([taken(0), taken(1)])
    assert sorted(log.kinds(), key=lambda kind: kind[0]) == [(0, Lost), (1, Lost)]


async def test_a_fatal_failure_of_one_unit_on_a_lost_device_ends_the_thread() -> None:
    log = Log(0)

    def answer(unit: Unit, length: int) -> UnitFailure:
        break_device(log)
        return UnitFailure(0, "STAGE_FAILED", "no", is_fatal=True)

    log.model.answer = answer
    with pytest.raises(DeviceLostError):
        log.run_units([taken(0)])


@pytest.mark.parametrize("call", ["open", "voice", "start_chat", "chat", "rebuild", "close"])
async def test_every_call_notices_a_lost_device(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(0)
    log.chat(2)
    log.channels[2].credit = 0
    log.run()

    def fail(*_: object) -> NoReturn:
        break_device(log)
        raise RuntimeError("CUDA error")

    for name in ("advance", "close"):
        monkeypatch.setattr(log.model, name, fail)
    match call:
        case "open":
            log.open(1)
        case "voice":
            log.channels[0].next = Continue(0, Part.VOICE, 1)
        case "start_chat":
            log.chat(1)
        case "chat":
            log.channels[2].credit = 1
        case "rebuild":
            log.channels[0].past_units = []
        case _:
            with pytest.raises(DeviceLostError):
                log.close(0)
            return
    with pytest.raises(DeviceLostError):
        log.run()


async def test_a_cleanup_that_loses_the_device_ends_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log(0)

    def fail(*_: object) -> NoReturn:
        raise DeviceLostError("AcceleratorError: CUDA error")

    monkeypatch.setattr(log.model, "close", fail)
    with pytest.raises(DeviceLostError, match="AcceleratorError"):
        log.close(0)


async def test_memory_of_another_conversation_breaks_no_slot() -> None:
    log = Log(0, 1, 2)
    log.model.memory_bytes += 1_000_000  # allocated by the conversation in slot 2
    assert log.close(0)
    assert log.close(1)
    assert not log.close(2), "nobody is left who could use the memory"
    log.model.memory_bytes -= 1_000_000
    assert log.close(2), "a slot that was broken is clean at a later check"


async def test_memory_may_grow_by_the_tolerance_and_no_more() -> None:
    log = Log(0, 1)
    log.model.memory_bytes += 100
    assert log.close(0)
    log.model.memory_bytes += 1
    assert not log.close(1)
    assert log.runner.memory_used_bytes == log.model.memory_bytes


async def test_a_model_that_sees_is_warmed_up_with_a_picture_it_can_show() -> None:
    shown: list[Unit] = []

    class Watched(ScriptedModel):
        def step(self, units: Sequence[Unit]) -> Iterator[UnitOutput | UnitFailure]:
            shown.extend(units)
            return super().step(units)

    for sees_frames in (True, False):
        model = Watched()
        model.constants = replace(model.constants, accepts_pictures=sees_frames)
        runner_of(model)
    with_frames, without = shown[:3], shown[3:]
    pictures = [frame for unit in with_frames for frame in unit.frames if isinstance(frame, bytes)]
    assert [decode_image(picture).size for picture in pictures] == [(1, 1)] * 3
    assert not any(unit.frames for unit in without)
