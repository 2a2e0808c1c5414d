"""The longest wait of a unit, in rounds of the device thread on a simulated clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.events import Event
from duplane.worker.engine.model_runner import ModelRunner
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.chat import ChatOptions, ChatOutput, ChatRequest
from duplane.worker.models.interface import (
    Continue,
    DeviceDescription,
    Item,
    Model,
    Open,
    Part,
    Preparer,
    Rebuild,
    Result,
    RunUnit,
    StartChat,
    Unfinished,
    VoiceReady,
)
from duplane.worker.models.scripted.model import ScriptedModel
from duplane.worker.models.types import (
    ConversationOptions,
    Opened,
    PastUnit,
    Rebuilt,
    Unit,
    UnitFailure,
    UnitOutput,
)

ROWS_PER_ROUND = 1024
AUDIO_ROWS, PICTURE_ROWS = 11, 66
PROMPTS_ROWS = (700, 1024, 8000)
SHARE_ROWS = 512  # of a step of the chats, and of a share of a rebuild
ROW_S, VOICE_S, SECONDS = 1e-4, 0.03, 30
SLOTS = 40
PICTURES = {0: 40, 1: 3, 2: 1}
VOICES = range(3, 12)  # slots whose voices are no longer cached when a turn ends
CHAT, REBUILDING, NEW = 30, 31, range(32, SLOTS)
SECOND_OF_SOUND = np.zeros(16_000, np.float32)
# The longest time of a round's units, and of a round: see the docstring of `round`.
UNITS_S = (SLOTS * AUDIO_ROWS + ROWS_PER_ROUND) * ROW_S
ROUND_S = UNITS_S + (ROWS_PER_ROUND + 2 * SHARE_ROWS) * ROW_S + 3 * VOICE_S


class TimedModel(ScriptedModel):
    """A model and device on a simulated clock, which advances by `ROW_S` with each fed row."""

    def __init__(self, prompt_rows: int) -> None:
        super().__init__(SLOTS)
        self._prompt_rows = prompt_rows
        self.now_s = 0.0
        self.answered_s: dict[int, float] = {}
        self.opened_s: dict[int, float] = {}
        self._left: dict[int, int] = {}  # rows of prompts
        self._begun: dict[int, Unit] = {}  # units of which some pictures are fed
        self._fed: dict[int, int] = {}  # their numbers of fed pictures
        self._awaiting: set[int] = set()
        self._turns = random.Random(0)
        self.turn_ends: list[int] = []  # number in each round that ends turns

    def description(self) -> DeviceDescription:
        return DeviceDescription("simulated")

    def load(self) -> tuple[Preparer, Model]:
        return self, self

    def load_preparer(self) -> Preparer:
        return self

    def memory_used_bytes(self) -> int:
        return 0

    def check(self) -> None: ...

    def pass_rows(self, rows: int) -> None:
        self.now_s += rows * ROW_S

    def row_count(self, unit: Unit) -> int:
        return AUDIO_ROWS + PICTURE_ROWS * len(unit.frames)

    def unit(self, unit: Unit) -> Unit:
        return replace(unit, rows=self.row_count(unit))

    def advance(self, items: Sequence[Item], row_budget: int) -> Iterator[Result]:
        units: list[Unit] = []
        for item in items:
            if isinstance(item, RunUnit):
                self._begun[item.slot] = item.unit
            if not isinstance(item, RunUnit) and not _sees(item):
                yield from self._advance_alone(item, row_budget)
            elif item.rows > row_budget:
                yield self.feed_ahead(self._begun[item.slot], row_budget)
            else:
                units.append(self._begun.pop(item.slot))
        yield from self.step(units)
        for unit in units:
            if unit.slot in self._awaiting:
                yield Unfinished(unit.slot, Part.VOICE, 1)

    def _advance_alone(self, item: Item, row_budget: int) -> Iterator[Result]:
        match item:
            case Open():
                self.now_s += VOICE_S
                self._left[item.slot] = self._prompt_rows if item.slot in NEW else 0
                yield self.feed_prompt(item.slot, row_budget)
            case StartChat():
                self.now_s += VOICE_S
                yield from super().advance([item], row_budget)
            case Continue(part=Part.PROMPT):
                yield self.feed_prompt(item.slot, row_budget)
            case Continue(part=Part.VOICE):
                self.start_turn(item.slot)
                yield VoiceReady(item.slot)
            case Rebuild():
                yield self.rebuild(item.slot, item.units)
            case _:
                yield from self.chat_step([item.slot])

    def feed_prompt(self, slot: int, row_count: int) -> Result:
        rows = min(row_count, self._left[slot])
        self.pass_rows(rows)
        self._left[slot] -= rows
        if self._left[slot]:
            return Unfinished(slot, Part.PROMPT, self._left[slot])
        self.opened_s[slot] = self.now_s
        return Opened(slot, self._prompt_rows)

    def feed_ahead(self, unit: Unit, row_count: int) -> Result:
        fed = self._fed.get(unit.slot, 0)
        count = min(max(1, row_count // PICTURE_ROWS), len(unit.frames) - 1 - fed)
        self.pass_rows(count * PICTURE_ROWS)
        self._fed[unit.slot] = fed + count
        left = self.row_count(unit) - (fed + count) * PICTURE_ROWS
        if fed + count + 1 == len(unit.frames):
            left = min(left, row_count)
        return Unfinished(unit.slot, Part.PICTURES, left)

    def step(self, units: Sequence[Unit]) -> Iterator[UnitOutput | UnitFailure]:
        for unit in units:
            fed = self._fed.pop(unit.slot, 0)
            self.pass_rows(self.row_count(unit) - fed * PICTURE_ROWS)
        for slot in sorted(self._awaiting.intersection(unit.slot for unit in units)):
            self.start_turn(slot)
        for unit in units:
            self.answered_s[unit.sequence] = self.now_s
            yield self.answer(unit, 1)
        ended = {unit.slot for unit in units if unit.slot in VOICES and self._turns.random() < 0.5}
        self._awaiting |= ended
        self.turn_ends += [len(ended)] if ended else []

    def start_turn(self, slot: int) -> None:
        self._awaiting.remove(slot)
        self.now_s += VOICE_S

    def rebuild(self, slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
        self.pass_rows(SHARE_ROWS)
        self.now_s += VOICE_S
        return Rebuilt(slot, min(1, len(units)), 1, len(units) <= 1)

    def chat_step(self, slots: Sequence[int]) -> Iterator[ChatOutput | UnitFailure]:
        if slots == [CHAT]:  # otherwise it is the warm-up
            self.pass_rows(SHARE_ROWS)
            return iter(())
        return super().chat_step(slots)


def _sees(item: Item) -> bool:
    """Return whether an item continues a unit with pictures."""
    return isinstance(item, Continue) and item.part is Part.PICTURES


def arrivals(draw: random.Random, model: TimedModel) -> list[UnitRecord]:
    """Return one unit per second and conversation, in order of arrival.

    Units of `VOICES` arrive together, so that several of their turns end in one round. All other
    units arrive at random times.
    """
    due = sorted(
        (n + (0.5 if slot in VOICES else draw.random()), slot)
        for slot in range(CHAT)
        for n in range(2, SECONDS)
    )
    return [
        UnitRecord(
            model.unit(
                Unit(
                    slot,
                    SECOND_OF_SOUND,
                    frames=(b"picture",) * (PICTURES.get(slot, 0) if draw.random() < 0.3 else 0),
                    sequence=number,
                )
            ),
            received_s=due_s,
        )
        for number, (due_s, slot) in enumerate(due)
    ]


def ignore(event: Event) -> None: ...


def running(model: TimedModel) -> tuple[DeviceThread, ModelRunner, list[SlotChannel]]:
    """Return a device thread that is not started, its runner, and the channels of all slots.

    The conversations before `CHAT` are open. Each round has a step of a chat,
    and the next 40 rounds have a share of a rebuild.
    """
    thread = DeviceThread(
        model, memory_tolerance_bytes=1, inbox_unit_count=8, rows_per_round=ROWS_PER_ROUND
    )
    thread._loop = asyncio.get_running_loop()
    runner = ModelRunner(model, 1, thread._channels, thread._post, lock=thread._lock)
    thread.constants = model.constants
    channels = [thread.attach(slot, ignore) for slot in range(SLOTS)]
    for channel in channels[:CHAT] + channels[REBUILDING : REBUILDING + 1]:
        thread.open(channel, model.conversation(ConversationOptions()))
    chat = model.chat(ChatRequest((), ChatOptions()), lambda: None)
    thread.open_chat(channels[CHAT], chat, credit=1)
    for _ in range(CHAT + 2):
        thread._run_round(runner)
    past = [PastUnit(Unit(REBUILDING, SECOND_OF_SOUND), (), b"", 0)] * 40
    thread.rebuild(channels[REBUILDING], past)
    model.now_s = 0.0
    return thread, runner, channels


@pytest.mark.parametrize("prompt_rows", PROMPTS_ROWS)
async def test_a_unit_that_just_missed_a_full_round_keeps_the_bound(prompt_rows: int) -> None:
    """Both rounds have all work that a round can have; conversations open before and after it."""
    model = TimedModel(prompt_rows)
    model._turns.random = lambda: 0.0  # all turns of `VOICES` end
    thread, runner, channels = running(model)
    missing = channels[2]
    for round_number in range(2):
        for slot in range(CHAT):
            if channels[slot] is missing and not round_number:
                continue
            pictures = (b"picture",) * {0: 14, 1: 1}.get(slot, 0)
            unit = Unit(slot, SECOND_OF_SOUND, frames=pictures, sequence=100 * round_number + slot)
            thread.put(channels[slot], UnitRecord(model.unit(unit)))
        thread.open(channels[NEW[round_number]], model.conversation(ConversationOptions()))
        begin_s = model.now_s
        thread._run_round(runner)
        assert model.now_s - begin_s <= ROUND_S + 1e-9
        assert model.now_s - begin_s >= 0.85 * ROUND_S or prompt_rows < ROWS_PER_ROUND
    assert model.answered_s[100 + missing.slot] <= ROUND_S + UNITS_S


@pytest.mark.parametrize("prompt_rows", PROMPTS_ROWS)
@pytest.mark.parametrize("seed", range(3))
async def test_no_unit_waits_longer_than_the_stated_bound(seed: int, prompt_rows: int) -> None:
    """Conversations open, see, end turns or are rebuilt beside others. A chat is in every round."""
    draw, model = random.Random(seed), TimedModel(prompt_rows)
    thread, runner, channels = running(model)
    conversation = model.conversation(ConversationOptions())
    waiting, opens = arrivals(draw, model), dict.fromkeys(NEW, 0.0)
    opens = {slot: draw.uniform(2, SECONDS) for slot in opens}
    units = {unit.sequence: unit for unit in waiting}
    older_rows: dict[int, int] = {}
    while (
        waiting or len(model.answered_s) < len(units) or not opens.keys() <= model.opened_s.keys()
    ):
        while waiting and waiting[0].received_s <= model.now_s:
            unit = waiting.pop(0)
            unanswered = units.keys() - model.answered_s.keys()
            older_rows[unit.sequence] = sum(
                model.row_count(units[number].unit)
                for number in unanswered
                if number <= unit.sequence and units[number].unit.frames
            )
            thread.put(channels[unit.slot], unit)
            assert not channels[unit.slot].dropped_count, "the inbox is full"
        for slot, due_s in opens.items():
            if due_s <= model.now_s and slot not in model._left:
                model._left[slot] = 0
                thread.open(channels[slot], conversation)
        begin_s = model.now_s
        thread._run_round(runner)
        assert model.now_s - begin_s <= ROUND_S + 1e-9
        await asyncio.sleep(0)
    earlier_s = dict.fromkeys(range(CHAT), 0.0)  # when the slot's earlier units were answered
    for number, answered_s in model.answered_s.items():
        unit = units[number]
        begin_s, earlier_s[unit.slot] = max(unit.received_s, earlier_s[unit.slot]), answered_s
        rounds = 1 + 2 * ceil(older_rows[number] / ROWS_PER_ROUND) if unit.unit.frames else 1
        rounds += len(VOICES) if unit.slot in VOICES else 0
        assert answered_s - begin_s <= rounds * ROUND_S + UNITS_S
    assert max(model.turn_ends) >= 5
    for slot, due_s in opens.items():
        rounds = 1 + len(NEW) * ceil(prompt_rows / ROWS_PER_ROUND)
        assert model.opened_s[slot] - due_s <= rounds * ROUND_S
