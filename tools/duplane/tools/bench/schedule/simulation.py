"""Runs the schedule of the engine in virtual time, on a device that has only costs."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from duplane.tools.bench.schedule.costs import Costs, Size, launch_ms
from duplane.tools.bench.schedule.slots import Slot
from duplane.tools.bench.schedule.traffic import WARM_UP_S, Task, chat
from duplane.worker.engine import schedule
from duplane.worker.engine.schedule import Block, Kind, Launch, Limits, Work
from duplane.worker.models.interface import Continue, Item, Part

LATE_S = 1.0
_NOISE = 0.04
_PAUSES_PER_S, _PAUSE_MS = 0.2, 10.0
"""Times vary by 4 %, and the host pauses for 10 ms in each 5 s of launches."""
_AFTER_S = 15.0
"""The run ends this long after the last arrival, whatever is left."""
_INSTANT_S = 1e-9
LLM, SPEECH = "L", "S"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered unit. If it was never answered, the time is infinite."""

    task: Task
    at_s: float

    @property
    def latency_s(self) -> float:
        return self.at_s - self.task.arrival_s


@dataclass(frozen=True)
class Outcome:
    """What a run has come to: its answers in their order, and the busy share of each lane."""

    answers: Sequence[Answer]
    busy: Mapping[str, float]

    def latencies(self, of: Callable[[Task], bool]) -> list[float]:
        """Return the seconds that units took which arrived after the warm-up, if `of` is true."""
        return [
            answer.latency_s
            for answer in self.answers
            if answer.task.arrival_s >= WARM_UP_S and of(answer.task)
        ]

    @property
    def late(self) -> int:
        """The number of ordinary units that were late."""
        return sum(latency > LATE_S for latency in self.latencies(is_ordinary))


def is_ordinary(task: Task) -> bool:
    """Return whether a unit has no large picture."""
    return not task.is_large


def is_spoken(task: Task) -> bool:
    """Return whether an ordinary unit is answered by speech."""
    return task.speaks and not task.is_large


@dataclass(slots=True)
class _Running:
    """A launch in its lanes. `left_s`: the rest of its time, with no other launch beside it."""

    launch: Launch
    lanes: tuple[str, ...]
    left_s: float


class Simulation:
    """One run of tasks, which are in the order of their arrival. `run` can be called once."""

    def __init__(
        self,
        costs: Costs,
        tasks: Sequence[Task],
        limits: Limits,
        *,
        lanes: Literal[1, 2] = 2,
        seed: int = 1,
    ) -> None:
        self._costs, self._limits = costs, limits
        self._chance = random.Random(seed)
        self._coming = deque(tasks)
        self._units_left = sum(task.kind is Kind.UNIT for task in tasks)
        self._end_s = tasks[-1].arrival_s + _AFTER_S
        self._slots = [Slot(number) for number in range(1 + max(task.slot for task in tasks))]
        self._lanes = (LLM, SPEECH)[:lanes]
        self._running: list[_Running] = []
        self._kept: Launch | None = None
        """A launch that needs both lanes, and waits until both are idle."""
        self._has_seen = False
        self._now_s = 0.0
        self._busy_s: dict[str, float] = dict.fromkeys(self._lanes, 0.0)
        self._answers: list[Answer] = []

    def run(self) -> Outcome:
        """Run until all units are answered, or the time is over."""
        coming = self._coming
        while self._units_left and self._now_s < self._end_s:
            while coming and coming[0].arrival_s <= self._now_s:
                task = coming.popleft()
                self._slots[task.slot].add(task, self._now_s)
            self._start()
            next_s = coming[0].arrival_s if coming else self._end_s
            self._pass_time(min(next_s, schedule.next_due_s(self._waiting(), self._now_s)))
        left = (task for slot in self._slots for task in slot.tasks if task.kind is Kind.UNIT)
        answers = [*self._answers, *(Answer(task, math.inf) for task in left)]
        busy = {lane: busy_s / self._now_s for lane, busy_s in self._busy_s.items()}
        return Outcome(answers, busy)

    def _start(self) -> None:
        """Start a launch in each idle lane that has work."""
        if self._kept is not None:
            if not self._running:
                self._run(self._kept, self._lanes)
                self._kept = None
            return
        for lane in self._lanes:
            if any(lane in running.lanes for running in self._running):
                continue
            launch = self._choose(lane)
            if launch is None:
                continue
            for item in launch.items:
                self._slots[item.slot].launch()
            if not launch.block.is_shared:
                self._run(launch, (lane,))
            elif self._running:
                self._kept = launch
                return
            else:
                self._run(launch, self._lanes)
                return

    def _choose(self, lane: str) -> Launch | None:
        waiting, limits, now_s = self._waiting(), self._limits, self._now_s
        has_seen = self._has_seen
        if len(self._lanes) == 1:
            return schedule.next_single(waiting, limits, now_s, is_shared=True, has_seen=has_seen)
        if lane == LLM:
            return schedule.next_llm(waiting, limits, now_s, is_shared=True, has_seen=has_seen)
        return schedule.next_speech(waiting, limits, now_s, is_shared=True)

    def _waiting(self) -> list[Work]:
        return [slot.work for slot in self._slots if slot.work is not None]

    def _run(self, launch: Launch, lanes: tuple[str, ...]) -> None:
        milliseconds = launch_ms(self._costs, self._size(launch))
        milliseconds *= math.exp(self._chance.gauss(0, _NOISE))
        if self._chance.random() < _PAUSES_PER_S * milliseconds / 1e3:
            milliseconds += _PAUSE_MS
        if LLM in lanes:
            self._has_seen = launch.block is Block.SEE
        self._running.append(_Running(launch, lanes, milliseconds / 1e3))

    def _size(self, launch: Launch) -> Size:
        items, slots = launch.items, [self._slots[item.slot] for item in launch.items]
        match launch.block:
            case Block.PASS:
                contexts = tuple(slot.task.context for slot in slots)
                fills = any(isinstance(i, Continue) and i.part is Part.FEED for i in items)
                return Size(launch.block, sum(item.rows for item in items), contexts, fills)
            case Block.SEE:
                return Size(launch.block, sum(item.rows for item in items))
            case Block.TALK:
                return Size(launch.block, len(items), steps=max(slot.left for slot in slots))
            case _:
                return Size(launch.block, len(items))

    def _pass_time(self, until_s: float) -> None:
        """Run until a launch ends, and at most until this time."""
        slower = self._costs.contention if len(self._running) > 1 else 1.0
        ends_s = [self._now_s + running.left_s * slower for running in self._running]
        before_s, self._now_s = self._now_s, min(until_s, *ends_s, self._end_s)
        for running in self._running:
            running.left_s -= (self._now_s - before_s) / slower
            for lane in running.lanes:
                self._busy_s[lane] += self._now_s - before_s
        ended = [running for running in self._running if running.left_s <= _INSTANT_S]
        self._running = [running for running in self._running if running.left_s > _INSTANT_S]
        for running in ended:
            for item in running.launch.items:
                self._deliver(item)

    def _deliver(self, item: Item) -> None:
        """Give a slot the result of its item."""
        slot = self._slots[item.slot]
        task = slot.advance(item, self._now_s)
        if task is None:
            return
        if task.kind is Kind.UNIT:
            self._answers.append(Answer(task, self._now_s))
            self._units_left -= 1
        elif task.kind is Kind.CHAT:
            slot.add(chat(task.slot, self._now_s, self._chance), self._now_s)
