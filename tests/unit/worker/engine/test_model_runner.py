"""The model runner without its thread: its rounds, and its handling of failures of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
import pytest
from support.worker.scripted_model import ScriptedChat, ScriptedModel, answer_loud

from duplane.worker.engine.events import Event, FailedUnit, Lost, OpenRefused
from duplane.worker.engine.interfaces import DeviceLostError
from duplane.worker.engine.model_runner import ModelRunner
from duplane.worker.models.minicpm_o.chat.types import ChatAudio, ChatImage, ChatOutput, ChatRequest
from duplane.worker.models.minicpm_o.types import (
    ConversationOptions,
    Opened,
    OptionError,
    Unit,
    UnitFailure,
    UnitOutput,
)
from duplane.worker.models.minicpm_o.vision.preprocessing import decode_image

ROWS = 100


class Log:
    """A runner of a scripted model, and all events that it has posted."""

    def __init__(self, *slots: int) -> None:
        self.model = ScriptedModel(slot_count=4)
        self.events: list[tuple[int, Event]] = []
        self.runner = ModelRunner(
            self.model, 100, lambda slot, event: self.events.append((slot, event))
        )
        for slot in slots:
            self.runner.open(slot, ConversationOptions())
            assert self.runner.feed_prompt(ROWS) == slot
        self.events.clear()

    def kinds(self) -> list[tuple[int, type]]:
        return [(slot, type(event)) for slot, event in self.events]


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


async def test_a_model_without_a_voice_is_tried_in_words() -> None:
    def refuse(request: ChatRequest) -> None:
        if request.options.generate_audio:
            raise OptionError("generate_audio", "is not possible")

    model = ScriptedModel()
    model.on_prepare = refuse
    ModelRunner(model, 100, lambda slot, event: None)
    assert not model.chats[0].options.generate_audio
    assert model.is_clean(0)


async def test_a_model_that_does_not_chat_is_not_asked_to() -> None:
    model = ScriptedModel()
    model.has_chat = False
    ModelRunner(model, 100, lambda slot, event: None)
    assert model.chats == {}


async def test_a_model_that_fails_on_a_chat_never_gets_ready() -> None:
    def fail(slot: int, request: ChatRequest) -> Iterator[ChatOutput | UnitFailure]:
        yield UnitFailure(slot, "NOT_FINITE", "the logits are not finite", is_fatal=True)

    model = ScriptedModel()
    model.on_chat = fail
    with pytest.raises(RuntimeError, match="fails on a chat"):
        ModelRunner(model, 100, lambda slot, event: None)


async def test_outputs_are_posted_as_they_come_and_all_is_settled() -> None:
    log = Log(0, 2)
    assert log.runner.run_units([taken(0), taken(2, 0.5)]) == set()
    assert log.kinds() == [(0, UnitOutput), (2, UnitOutput)]
    assert all(isinstance(e, UnitOutput) and e.unit.batch_size == 2 for _, e in log.events)
    assert log.runner.run_units([taken(0), taken(2)]) == set()
    assert log.model.violations == []


async def test_a_step_that_raises_loses_all_its_conversations() -> None:
    log = Log(0, 1, 2)

    def answer(unit: Unit, length: int) -> UnitOutput:
        if unit.slot == 1:
            raise RuntimeError("no")
        return answer_loud(unit, length)

    log.model.answer = answer
    assert log.runner.run_units([taken(0), taken(1)]) == {0, 1}
    assert log.kinds() == [(0, UnitOutput), (0, Lost), (1, Lost)]
    assert log.runner.run_units([taken(2)]) == set()


async def test_a_unit_that_is_left_without_an_answer_loses_the_round() -> None:
    log = Log(0, 1)
    step = log.model.step

    def forget(units: Sequence[Unit]) -> Iterator[UnitOutput | UnitFailure]:
        yield from step(units[:1])

    log.model.step = forget
    assert log.runner.run_units([taken(0), taken(1)]) == {0, 1}


async def test_a_settle_that_raises_loses_the_round() -> None:
    log = Log(0)

    def fail(slots: Sequence[int]) -> list[UnitFailure]:
        raise RuntimeError("no")

    log.model.settle = fail
    assert log.runner.run_units([taken(0)]) == {0}
    assert log.kinds() == [(0, UnitOutput), (0, Lost)]


async def test_a_slot_that_cannot_be_settled_is_lost_and_no_other() -> None:
    log = Log(0, 1)
    log.model.settle = lambda slots: [UnitFailure(1, "STAGE_FAILED", "no", True)]
    assert log.runner.run_units([taken(0), taken(1)]) == {1}
    assert log.kinds() == [(0, UnitOutput), (1, UnitOutput), (1, Lost)]


@pytest.mark.parametrize("is_fatal", [False, True])
async def test_only_a_fatal_failure_loses_its_conversation(is_fatal: bool) -> None:
    log = Log(0, 1)

    def answer(unit: Unit, length: int) -> UnitOutput | UnitFailure:
        if unit.slot == 1:
            return UnitFailure(1, "NOT_FINITE", "no", is_fatal)
        return answer_loud(unit, length)

    log.model.answer = answer
    assert log.runner.run_units([taken(0), taken(1)]) == ({1} if is_fatal else set())
    assert log.kinds() == [(0, UnitOutput), (1, FailedUnit)]


@pytest.mark.parametrize(
    ("error", "event"), [(OptionError("top_k", "is odd"), OpenRefused), (MemoryError(), Lost)]
)
async def test_an_open_that_raises_is_reported(error: Exception, event: type) -> None:
    log = Log()

    def fail(slot: int, options: ConversationOptions) -> None:
        raise error

    log.model.on_open = fail
    log.runner.open(1, ConversationOptions())
    assert not log.runner.opening
    assert log.kinds() == [(1, event)]
    log.model.on_open = lambda slot, options: None
    assert log.runner.close(1)
    log.runner.open(1, ConversationOptions())
    assert log.runner.feed_prompt(ROWS) == 1
    assert log.kinds()[-1] == (1, Opened)


async def test_a_prompt_is_fed_in_parts_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    left, fed = {0: 2 * ROWS + 1, 1: 1, 2: 1}, list[int]()
    opened = Opened(1, (), has_window=False)

    def feed_prompt(slot: int, row_count: int) -> Opened | None:
        fed.append(slot)
        left[slot] -= row_count
        return None if left[slot] > 0 else opened

    monkeypatch.setattr(log.model, "feed_prompt", feed_prompt)
    for slot in left:
        log.runner.open(slot, ConversationOptions())
    assert log.runner.close(1)
    found = [log.runner.feed_prompt(ROWS) for _ in range(4)]
    assert (found, fed) == ([None, None, 0, 2], [0, 0, 0, 2])
    assert log.events == [(0, opened), (2, opened)]
    assert not log.runner.opening


async def test_a_prompt_that_fails_loses_its_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(slot: int, row_count: int) -> NoReturn:
        raise RuntimeError("no")

    log = Log()
    monkeypatch.setattr(log.model, "feed_prompt", fail)
    log.runner.open(0, ConversationOptions())
    assert log.runner.feed_prompt(ROWS) is None
    assert log.kinds() == [(0, Lost)]
    assert not log.runner.opening
    assert log.runner.close(0)


async def test_the_voice_that_was_awaited_first_is_computed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, started, awaited = Log(0, 1, 2, 3), list[int](), {1, 2}
    monkeypatch.setattr(log.model, "awaits_voice", awaited.__contains__)
    monkeypatch.setattr(log.model, "start_turn", started.append)
    assert not log.runner.run_units([taken(2), taken(0), taken(1)])
    awaited.add(0)
    assert not log.runner.run_units([taken(0)])
    assert log.runner.close(2)
    assert [log.runner.start_turn() for _ in range(2)] == [set(), set()]
    assert started == [1, 0]
    assert not log.runner.awaiting_voice


async def test_a_voice_that_cannot_be_computed_loses_its_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(slot: int) -> NoReturn:
        raise RuntimeError("no")

    log = Log(0)
    monkeypatch.setattr(log.model, "awaits_voice", lambda slot: True)
    monkeypatch.setattr(log.model, "start_turn", fail)
    log.runner.run_units([taken(0)])
    assert log.runner.start_turn() == {0}
    assert log.kinds()[-1] == (0, Lost)
    assert not log.runner.awaiting_voice


def break_device(log: Log) -> None:
    log.model.device_error = RuntimeError("CUDA error: an illegal memory access")


async def test_a_step_that_raises_on_a_lost_device_ends_the_thread() -> None:
    log = Log(0, 1)

    def answer(unit: Unit, length: int) -> UnitOutput:
        break_device(log)
        raise RuntimeError("CUDA error")

    log.model.answer = answer
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        log.runner.run_units([taken(0), taken(1)])
    assert sorted(log.kinds(), key=lambda kind: kind[0]) == [(0, Lost), (1, Lost)]


async def test_a_fatal_failure_of_one_unit_on_a_lost_device_ends_the_thread() -> None:
    log = Log(0)

    def answer(unit: Unit, length: int) -> UnitFailure:
        break_device(log)
        return UnitFailure(0, "STAGE_FAILED", "no", is_fatal=True)

    log.model.answer = answer
    with pytest.raises(DeviceLostError):
        log.runner.run_units([taken(0)])


@pytest.mark.parametrize(
    "call", ["open", "feed_prompt", "start_turn", "open_chat", "run_chats", "close"]
)
async def test_every_call_notices_a_lost_device(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(0)

    def fail(*_: object) -> NoReturn:
        break_device(log)
        raise RuntimeError("CUDA error")

    log.runner.opening.append(2)
    log.runner.awaiting_voice.append(0)
    for name in ("begin", "feed_prompt", "start_turn", "open_chat", "chat_step", "close"):
        monkeypatch.setattr(log.model, name, fail)
    calls = {
        "open": lambda: log.runner.open(1, ConversationOptions()),
        "feed_prompt": lambda: log.runner.feed_prompt(ROWS),
        "start_turn": log.runner.start_turn,
        "open_chat": lambda: log.runner.open_chat(1, ScriptedChat(ChatRequest(()), 1)),
        "run_chats": lambda: log.runner.run_chats([1]),
        "close": lambda: log.runner.close(0),
    }
    with pytest.raises(DeviceLostError):
        calls[call]()


async def test_memory_of_another_conversation_breaks_no_slot() -> None:
    log = Log(0, 1, 2)
    log.model.memory_bytes += 1_000_000  # allocated by the conversation in slot 2
    assert log.runner.close(0)
    assert log.runner.close(1)
    assert not log.runner.close(2), "nobody is left who could use the memory"
    log.model.memory_bytes -= 1_000_000
    assert log.runner.close(2), "a slot that was broken is clean at a later check"


async def test_memory_may_grow_by_the_tolerance_and_no_more() -> None:
    log = Log(0, 1)
    log.model.memory_bytes += 100
    assert log.runner.close(0)
    log.model.memory_bytes += 1
    assert not log.runner.close(1)
    assert log.runner.memory_used_bytes == log.model.memory_bytes


async def test_a_model_that_sees_is_warmed_up_with_a_picture_it_can_show() -> None:
    shown: list[Unit] = []

    class Watched(ScriptedModel):
        def step(self, units: Sequence[Unit]) -> Iterator[UnitOutput | UnitFailure]:
            shown.extend(units)
            return super().step(units)

    for sees_frames in (True, False):
        model = Watched()
        model.sees_frames = sees_frames
        ModelRunner(model, 100, lambda slot, event: None)
    with_frames, without = shown[:3], shown[3:]
    pictures = [frame for unit in with_frames for frame in unit.frames if isinstance(frame, bytes)]
    assert [decode_image(picture).size for picture in pictures] == [(1, 1)] * 3
    assert not any(unit.frames for unit in without)
