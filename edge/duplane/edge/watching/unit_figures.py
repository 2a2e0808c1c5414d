"""How long the latest units of an edge took, which were late and why, and which sessions moved.

Pages for operators show these figures. They cover the sessions of this edge only.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from duplane.fabric.durations import to_seconds
from duplane.fabric.v1 import session_pb2

STEP_S = 2.0  # one sample of the charts
SAMPLE_COUNT = 300  # ten minutes; older samples are dropped
MAX_LATE_UNITS = 64  # the newest are kept
MAX_MOVES = 64  # the newest are kept

# Upper bounds in seconds of the classes in which durations are counted; longer ones have their own.
_BOUNDS_S = (
    *(0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 1.5, 2.0, 3.0, 5.0),
)
# The worker's stages that follow one another. `settle` is a part of `inbox`, `condition` one of
# `talker`.
_WORKER_STAGES = (
    *("prepare", "inbox", "device", "audio", "vision"),
    *("prefill", "decode", "talker", "vocoder"),
)
EDGE, MOVE, REST = "edge", "move", "rest"


class LateUnit(NamedTuple):
    """A unit that took longer than it lasts, and the stage that took the longest part of it."""

    session_id: str
    worker_id: str
    sequence: int
    at_s: float
    """Unix time of its answer."""
    taken_ms: float
    stage: str
    stage_ms: float


class Move(NamedTuple):
    """An attempt of a session to continue at another worker, which has ended."""

    session_id: str
    at_s: float
    """Unix time of its end."""
    from_worker_id: str
    to_worker_id: str
    cause: str
    outcome: str
    silent_ms: float


def longest_stage(
    taken_s: float, edge_s: float, move_s: float, times: session_pb2.StageTimes
) -> tuple[str, float]:
    """Return the stage of a unit that took the longest, and its seconds.

    `edge_s` is the time before the unit was sent to its worker, `move_s` the time in which its
    session had no worker. What nobody measured is the rest: the network, the worker's process and
    the machine that did not run it.
    """
    stages = {
        EDGE: edge_s,
        MOVE: move_s,
        **{name: to_seconds(getattr(times, name)) for name in _WORKER_STAGES},
    }
    stages[REST] = taken_s - sum(stages.values())
    return max(stages.items(), key=lambda stage: stage[1])


@dataclass(slots=True)
class _Step:
    """The units of one step of time."""

    number: int
    late_count: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))


class Sample(NamedTuple):
    """The units of one step of time. The percentiles are None without units."""

    at_s: float
    """Unix time of the end of the step."""
    unit_count: int
    late_count: int
    p50_ms: float | None
    p95_ms: float | None


class UnitFigures:
    """Counts units by the step in which they were answered. Times are Unix times in seconds."""

    def __init__(self) -> None:
        self._steps = deque[_Step](maxlen=SAMPLE_COUNT)
        self._late = deque[tuple[int, LateUnit]](maxlen=MAX_LATE_UNITS)
        self._moves = deque[tuple[int, Move]](maxlen=MAX_MOVES)
        self._numbers = itertools.count(1)
        self.last_number = 0  # of the latest late unit or move

    def answered(self, taken_s: float, now_s: float, *, is_late: bool) -> None:
        """Count a unit."""
        number = int(now_s / STEP_S)
        step = self._steps[-1] if self._steps else None
        # The wall clock may be set back: then the units count for the newest step.
        if step is None or number > step.number:
            step = _Step(number)
            self._steps.append(step)
        step.counts[bisect.bisect_left(_BOUNDS_S, taken_s)] += 1
        step.late_count += is_late

    def late(self, unit: LateUnit) -> None:
        """Keep a late unit."""
        self.last_number = next(self._numbers)
        self._late.append((self.last_number, unit))

    def moved(self, move: Move) -> None:
        """Keep the end of a move."""
        self.last_number = next(self._numbers)
        self._moves.append((self.last_number, move))

    def late_units(self, after: int, last: int) -> Sequence[LateUnit]:
        """Return the late units whose number is above `after` and at most `last`, oldest first."""
        return [unit for number, unit in self._late if after < number <= last]

    def moves(self, after: int, last: int) -> Sequence[Move]:
        """Return the moves whose number is above `after` and at most `last`, oldest first."""
        return [move for number, move in self._moves if after < number <= last]

    def samples(self, now_s: float) -> Sequence[Sample]:
        """Return the samples of the steps that have ended, oldest first. Steps without units have
        none."""
        present = int(now_s / STEP_S)
        oldest = present - SAMPLE_COUNT
        return [_sample(step) for step in self._steps if oldest <= step.number < present]

    def sample(self, number: int) -> Sample:
        """Return the sample of one of the newest steps."""
        for step in reversed(self._steps):
            if step.number <= number:
                return _sample(step if step.number == number else _Step(number))
        return _sample(_Step(number))


def _sample(step: _Step) -> Sample:
    count = sum(step.counts)
    return Sample(
        (step.number + 1) * STEP_S,
        count,
        step.late_count,
        _percentile_ms(step.counts, 0.5 * count) if count else None,
        _percentile_ms(step.counts, 0.95 * count) if count else None,
    )


def _percentile_ms(counts: Sequence[int], rank: float) -> float:
    """Return the duration below which `rank` units are, interpolated within its class."""
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low_s = _BOUNDS_S[index - 1] if index else 0.0
            high_s = _BOUNDS_S[min(index, len(_BOUNDS_S) - 1)]
            share = (rank - below) / count
            return round((low_s + (high_s - low_s) * share) * 1e3, 1)
        below += count
    raise ValueError("no unit has this rank")
