"""What the device does in a round, without its thread: whatever the model does, it stops here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from scripted_model import ScriptedModel, answer_loud

from duplane.worker.inbox import Unit
from duplane.worker.model.images import decode
from duplane.worker.model.types import (
    ConversationOptions,
    Opened,
    OptionError,
    UnitFailure,
    UnitInput,
    UnitOutput,
)
from duplane.worker.rounds import Done, Event, Lost, OpenRefused, Rounds, Taken


class Log:
    """Rounds over a scripted model, with every event it posted."""

    def __init__(self, *slots: int) -> None:
        self.model = ScriptedModel(slot_count=4)
        self.events: list[tuple[int, Event]] = []
        self.rounds = Rounds(self.model, 100, lambda slot, event: self.events.append((slot, event)))
        for slot in slots:
            assert self.rounds.open(slot, ConversationOptions())
        self.events.clear()

    def kinds(self) -> list[tuple[int, type]]:
        return [(slot, type(event)) for slot, event in self.events]


def taken(slot: int, value: float = 0.0) -> Taken:
    return Taken(slot, Unit(0, np.full(4, value, np.float32), False, 0.0, 0), 0)


async def test_the_warm_up_leaves_no_conversation() -> None:
    log = Log()
    assert log.model.is_clean(0)
    assert log.model.rounds == [(0,)] * 3


async def test_outputs_are_posted_as_they_come_and_all_is_settled() -> None:
    log = Log(0, 2)
    assert log.rounds.run([taken(0), taken(2, 0.5)]) == set()
    assert log.kinds() == [(0, Done), (2, Done)]
    assert all(isinstance(e, Done) and e.batch_size == 2 for _, e in log.events)
    assert log.rounds.run([taken(0), taken(2)]) == set()
    assert log.model.breaches == []


async def test_a_step_that_raises_loses_all_its_conversations() -> None:
    log = Log(0, 1, 2)

    def answer(unit: UnitInput, length: int) -> UnitOutput:
        if unit.slot == 1:
            raise RuntimeError("no")
        return answer_loud(unit, length)

    log.model.answer = answer
    assert log.rounds.run([taken(0), taken(1)]) == {0, 1}
    assert log.kinds() == [(0, Done), (0, Lost), (1, Lost)]
    assert log.rounds.run([taken(2)]) == set()


async def test_a_unit_that_is_left_without_an_answer_loses_the_round() -> None:
    log = Log(0, 1)
    step = log.model.step

    def forget(units: Sequence[UnitInput]) -> Iterator[UnitOutput | UnitFailure]:
        yield from step(units[:1])

    log.model.step = forget
    assert log.rounds.run([taken(0), taken(1)]) == {0, 1}


async def test_a_settle_that_raises_loses_the_round() -> None:
    log = Log(0)

    def fail(slots: Sequence[int]) -> list[UnitFailure]:
        raise RuntimeError("no")

    log.model.settle = fail
    assert log.rounds.run([taken(0)]) == {0}
    assert log.kinds() == [(0, Done), (0, Lost)]


async def test_a_slot_that_cannot_be_settled_is_lost_and_no_other() -> None:
    log = Log(0, 1)
    log.model.settle = lambda slots: [UnitFailure(1, "STAGE_FAILED", "no", True)]
    assert log.rounds.run([taken(0), taken(1)]) == {1}
    assert log.kinds() == [(0, Done), (1, Done), (1, Lost)]


@pytest.mark.parametrize("is_fatal", [False, True])
async def test_only_a_fatal_failure_loses_its_conversation(is_fatal: bool) -> None:
    log = Log(0, 1)

    def answer(unit: UnitInput, length: int) -> UnitOutput | UnitFailure:
        if unit.slot == 1:
            return UnitFailure(1, "NOT_FINITE", "no", is_fatal)
        return answer_loud(unit, length)

    log.model.answer = answer
    assert log.rounds.run([taken(0), taken(1)]) == ({1} if is_fatal else set())
    assert log.kinds() == [(0, Done), (1, Done)]


@pytest.mark.parametrize(
    ("error", "event"), [(OptionError("top_k", "is odd"), OpenRefused), (MemoryError(), Lost)]
)
async def test_an_open_that_raises_is_told(error: Exception, event: type) -> None:
    log = Log()

    def fail(slot: int, options: ConversationOptions) -> None:
        raise error

    log.model.on_open = fail
    assert not log.rounds.open(1, ConversationOptions())
    assert log.kinds() == [(1, event)]
    log.model.on_open = lambda slot, options: None
    assert log.rounds.close(1)
    assert log.rounds.open(1, ConversationOptions())
    assert log.kinds()[-1] == (1, Opened)


async def test_memory_may_grow_by_the_tolerance_and_no_more() -> None:
    log = Log(0, 1)
    log.model.memory_bytes += 100
    assert log.rounds.close(0)
    log.model.memory_bytes += 1
    assert not log.rounds.close(1)
    assert log.rounds.memory_used_bytes == log.model.memory_bytes


async def test_a_model_that_sees_is_warmed_up_with_a_picture_it_can_show() -> None:
    shown: list[UnitInput] = []

    class Watched(ScriptedModel):
        def step(self, units: Sequence[UnitInput]) -> Iterator[UnitOutput | UnitFailure]:
            shown.extend(units)
            return super().step(units)

    for sees_frames in (True, False):
        model = Watched()
        model.sees_frames = sees_frames
        Rounds(model, 100, lambda slot, event: None)
    with_frames, without = shown[:3], shown[3:]
    pictures = [frame for unit in with_frames for frame in unit.frames if isinstance(frame, bytes)]
    assert [decode(picture).size for picture in pictures] == [(1, 1)] * 3
    assert not any(unit.frames for unit in without)
