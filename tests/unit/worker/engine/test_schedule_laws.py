"""Laws of the schedule, in virtual time, with loads and costs from seeds.

A launch *passes over* the work that waits for its lane and that it leaves out. The laws say which
launches may pass over which work, and so how long a unit can wait.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from duplane.tools.bench.schedule.costs import BUILT_IN, Computed
from duplane.tools.bench.schedule.simulation import Outcome, Simulation
from duplane.tools.bench.schedule.traffic import Task, Traffic, tasks
from duplane.worker.engine import schedule
from duplane.worker.engine.schedule import ROW_S, Block, Kind, Launch, Limits, Work
from duplane.worker.models.interface import Continue, Part

LIMITS = Limits(hear=3, pieces=2, many_pieces=4, rows=48, many_rows=128, background=16, vocode=3)
"""Small, so that a few conversations fill launches."""
SPEECH = (Block.TALK, Block.VOCODE, Block.VOICE)
BESIDE = (Block.OPEN, Block.REBUILD, Block.SETTLE)


@dataclass(frozen=True)
class Choice:
    """A choice of a lane: what waited for it, and the launch."""

    chooser: str
    now_s: float
    waiting: list[Work]
    launch: Launch | None

    @property
    def passed_over(self) -> list[Work]:
        """Return the works of the launch's lane that it leaves out, without chats."""
        launch = self.launch
        assert launch is not None
        slots = {item.slot for item in launch.items}
        is_speech = launch.block in SPEECH
        return [
            work
            for work in self.waiting
            if work.slot not in slots
            and work.kind is Kind.UNIT
            and (work.block in SPEECH) is is_speech
        ]

    @property
    def chosen(self) -> list[tuple[Work, int]]:
        """Return the works of the launch, with the rows that it does."""
        assert self.launch is not None
        by_slot = {work.slot: work for work in self.waiting}
        return [(by_slot[item.slot], item.rows) for item in self.launch.items]


class Run:
    """A run with small limits, and all choices of the schedule; it runs when it is first read."""

    def __init__(
        self, load: Traffic, costs: Computed = BUILT_IN["h200"], lanes: int = 2, seed: int = 1
    ) -> None:
        self.load, self.costs, self.lanes, self.seed = load, costs, lanes, seed
        self.choices: list[Choice] = []

    def __repr__(self) -> str:
        return f"Run({self.load}, {self.costs}, {self.lanes}, {self.seed})"

    @cached_property
    def tasks(self) -> Sequence[Task]:
        return tasks(self.load, random.Random(self.seed))

    @cached_property
    def outcome(self) -> Outcome:
        lanes = 1 if self.lanes == 1 else 2
        with pytest.MonkeyPatch.context() as patch:
            for name in ("next_single",) if lanes == 1 else ("next_llm", "next_speech"):
                patch.setattr(schedule, name, self._noting(name, getattr(schedule, name)))
            return Simulation(self.costs, self.tasks, LIMITS, lanes=lanes, seed=self.seed).run()

    @cached_property
    def launches(self) -> list[Choice]:
        assert self.outcome.answers
        return [choice for choice in self.choices if choice.launch is not None]

    def _noting(
        self, name: str, choose: Callable[..., Launch | None]
    ) -> Callable[..., Launch | None]:
        def note(
            waiting: Sequence[Work], limits: Limits, now_s: float, **how: bool
        ) -> Launch | None:
            launch = choose(waiting, limits, now_s, **how)
            self.choices.append(Choice(name, now_s, list(waiting), launch))
            return launch

        return note


LOADS = st.builds(
    Traffic,
    sessions=st.integers(1, 24),
    speaking=st.sampled_from((0.0, 0.3, 0.6, 1.0)),
    seconds=st.just(4.0),
    large_per_s=st.sampled_from((0.0, 1.0)),
    pieces=st.sampled_from((3, 10, 24)),
    video=st.sampled_from((0.0, 0.5)),
    chats=st.integers(0, 3),
    opens_per_s=st.sampled_from((0.0, 1.0)),
)
COSTS = st.builds(
    replace,
    st.just(BUILT_IN["h200"]),
    bandwidth=st.floats(2e12, 8e12),
    vocoder_ms=st.floats(0.5, 5.0),
    host_ms=st.floats(0.0, 2.0),
    contention=st.floats(1.0, 2.0),
)
RUNS = st.builds(
    Run, LOADS, costs=COSTS, lanes=st.sampled_from((1, 2)), seed=st.integers(0, 10_000)
)
FULL = Run(Traffic(24, 0.6, 4.0, large_per_s=1.0, pieces=24, video=0.5, chats=2, opens_per_s=1.0))


def each_unit_is_answered_once_and_in_order(run: Run) -> None:
    answered: defaultdict[int, list[float]] = defaultdict(list)
    for answer in run.outcome.answers:
        assert answer.latency_s < math.inf
        answered[answer.task.slot].append(answer.task.arrival_s)
    sent: defaultdict[int, list[float]] = defaultdict(list)
    for task in run.tasks:
        if task.kind is Kind.UNIT:
            sent[task.slot].append(task.arrival_s)
    assert answered == sent


def no_lane_is_idle_with_work(run: Run) -> None:
    assert run.launches
    for choice in run.choices:
        if choice.launch is None:
            lanes = {"next_llm": (False,), "next_speech": (True,)}.get(choice.chooser, (0, 1))
            idle = [work for work in choice.waiting if (work.block in SPEECH) in lanes]
            assert all(work.kind is Kind.CHAT and work.due_s > choice.now_s for work in idle)


def launches_have_their_limits(run: Run) -> None:
    for choice in run.launches:
        launch = choice.launch
        assert launch is not None
        assert len({item.slot for item in launch.items}) == len(launch.items)
        assert all(work.block is launch.block for work, _ in choice.chosen)
        if launch.block in (Block.PASS, Block.SEE):
            assert all(0 < rows <= work.item.rows for work, rows in choice.chosen)
        size = sum(item.rows for item in launch.items)
        is_large = any(work.size >= LIMITS.large_unit for work, _ in choice.chosen)
        match launch.block:
            case Block.HEAR:
                assert len(launch.items) <= LIMITS.hear
            case Block.SEE:
                assert size <= (LIMITS.many_pieces if is_large else LIMITS.pieces)
            case Block.PASS:
                has_units = any(work.kind is Kind.UNIT for work, _ in choice.chosen)
                is_wide = is_large or not has_units
                assert size <= (LIMITS.many_rows if is_wide else LIMITS.rows)
                assert _rows(choice, Kind.BACKGROUND) <= LIMITS.background or not has_units
            case Block.VOCODE:
                assert len(launch.items) <= LIMITS.vocode
            case _:
                assert launch.block in (Block.BEGIN, Block.TALK) or len(launch.items) == 1


def rows_of_a_unit_are_in_the_next_pass(run: Run) -> None:
    """A pass leaves out input only if it is full of next ids, and of input that is due earlier."""
    for choice in run.launches:
        if choice.launch is None or choice.launch.block is not Block.PASS:
            continue
        for work in choice.passed_over:
            if work.block is Block.PASS:
                assert sum(rows for _, rows in choice.chosen) >= LIMITS.rows
                assert not _rows(choice, Kind.BACKGROUND)
                assert not _is_step(work)
                assert all(
                    _input_s(other) <= _input_s(work)
                    for other, _ in choice.chosen
                    if not _is_step(other) and other.size < LIMITS.large_unit
                )


def what_may_run_before_the_rows_of_a_unit(run: Run) -> None:
    """HEAR only of all units that came meanwhile, no SEE twice in a row, and rule 3."""
    before = Block.PASS
    for choice in run.launches:
        launch = choice.launch
        assert launch is not None
        if launch.block in SPEECH:
            continue
        waiting = [work for work in choice.passed_over if work.block is Block.PASS]
        if launch.block is Block.SEE and before is Block.SEE:
            assert not waiting
        if launch.block in BESIDE:
            assert all(launch.deadline_s <= work.deadline_s for work in choice.passed_over)
        for work in choice.passed_over:
            if work.block is Block.BEGIN:
                assert launch.block is not Block.BEGIN
            if work.block is Block.HEAR:
                is_full = launch.block is Block.HEAR and len(launch.items) == LIMITS.hear
                assert launch.block is Block.BEGIN or is_full
        before = launch.block


def speech_waits_for_one_talk_and_earlier_chunks_and_voices(run: Run) -> None:
    for choice in run.launches:
        launch = choice.launch
        assert launch is not None
        for work in choice.passed_over:
            if launch.block is Block.VOICE and work.block in SPEECH:
                assert work.kind is not Kind.UNIT or launch.deadline_s <= work.deadline_s
                continue
            if work.block is Block.TALK:
                assert launch.block is Block.VOCODE
            if work.block is Block.VOCODE:
                assert launch.block is Block.VOCODE
                assert len(launch.items) == LIMITS.vocode
                assert all(other.deadline_s <= work.deadline_s for other, _ in choice.chosen)


def one_lane_serves_the_oldest_unit(run: Run) -> None:
    """Of the two lanes that share the device, that with the oldest unit runs, but units begin."""
    for choice in run.launches:
        launch = choice.launch
        units = [work for work in choice.waiting if work.kind is Kind.UNIT]
        if choice.chooser != "next_single" or launch is None or not units:
            continue
        oldest = min(units, key=lambda work: work.deadline_s)
        is_same_lane = (launch.block in SPEECH) is (oldest.block in SPEECH)
        assert is_same_lane or launch.block is Block.BEGIN or launch.deadline_s < oldest.deadline_s


LAWS = (
    each_unit_is_answered_once_and_in_order,
    no_lane_is_idle_with_work,
    launches_have_their_limits,
    rows_of_a_unit_are_in_the_next_pass,
    what_may_run_before_the_rows_of_a_unit,
    speech_waits_for_one_talk_and_earlier_chunks_and_voices,
    one_lane_serves_the_oldest_unit,
)


@pytest.mark.slow
@settings(
    max_examples=20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink a run would take minutes
)
@given(RUNS)
@example(FULL)
@example(Run(FULL.load, lanes=1))
def test_laws_hold(run: Run) -> None:
    for law in LAWS:
        law(run)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most_s"), [(Kind.CHAT, 2.5), (Kind.BACKGROUND, 1.0)])
@pytest.mark.parametrize(("lanes", "sessions"), [(1, 20), (2, 56)])
def test_other_work_moves(lanes: int, sessions: int, kind: Kind, most_s: float) -> None:
    """Below the knee, prompts and openings move each second, and chats by their deadline of 2 s."""
    load = Traffic(sessions, 0.5, 8.0, large_per_s=0.3, video=0.2, chats=3, opens_per_s=0.5)
    run = Run(load, lanes=lanes)
    assert all(answer.latency_s < 1 for answer in run.outcome.answers)
    moved_s = 0.0
    for choice in run.choices:
        others = [w for w in choice.waiting if w.kind is kind and w.due_s <= choice.now_s]
        chosen = choice.chosen if choice.launch is not None else []
        if not others or any(work.kind is kind for work, _ in chosen):
            moved_s = choice.now_s
        assert choice.now_s - moved_s < most_s


def _rows(choice: Choice, kind: Kind) -> int:
    """Return the rows of a pass that belong to works of this kind."""
    return sum(rows for work, rows in choice.chosen if work.kind is kind)


def _is_step(work: Work) -> bool:
    return isinstance(work.item, Continue) and work.item.part is Part.DECODE


def _input_s(work: Work) -> float:
    return work.deadline_s + ROW_S * work.size
