"""The figures of one run, and whether the run holds: one row of the tables and of the JSON file.

Pure.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from duplane.tools.bench.load.ledger import Counts, Timed
from duplane.tools.bench.load.reports import LoadFigures
from duplane.tools.bench.report import percentile

_MB = 1e6


@dataclass(frozen=True)
class ProcessSample:
    """The memory of one process at one time, and the CPU time that it has used so far."""

    at_s: float
    rss_bytes: int
    cpu_s: float


@dataclass(frozen=True)
class Percentiles:
    """A distribution, in milliseconds; null without values."""

    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Compute the percentiles, rounded to microseconds."""
        ordered = sorted(values)
        shares = (0.5, 0.95, 0.99, 1.0)
        found = [round(percentile(ordered, share), 3) if ordered else None for share in shares]
        return cls(*found)


@dataclass(frozen=True)
class ProcessCost:
    """The cost of one process of the fabric. All workers together count as one process."""

    cpu_us_per_unit: float | None  # CPU time of the measured seconds per answered unit
    cpu_cores: float  # CPU time per measured second: 1.0 is one core
    rss_before_mb: float  # before the first session
    rss_middle_mb: float  # median of the third quarter of the measured seconds
    rss_end_mb: float  # median of the last quarter
    rss_peak_mb: float


@dataclass(frozen=True)
class GeneratorCost:
    """The punctuality and the cost of the load generators."""

    lateness_ms: Percentiles  # delay of each unit against its schedule
    loop_delay_ms: Percentiles  # delay of the generators' event loops, measured every 10 ms
    cost: ProcessCost
    is_punctual: bool


@dataclass(frozen=True)
class Stop:
    """A worker that got a signal to end, and the number of its sessions."""

    at_s: float  # monotonic time
    session_count: int


@dataclass(frozen=True)
class Moves:
    """What the clients noticed of the workers that were stopped.

    `is_killed` is False if the workers could drain before their end.
    """

    is_killed: bool
    stop_count: int
    session_count: int  # sessions that were at a worker when it was stopped, added over all stops
    gap_ms: Percentiles  # latency of the first unit that such a session got answered after the stop


@dataclass(frozen=True)
class Row:
    """The figures of one run."""

    dialect: str
    sessions: int
    phases: str
    seconds: float
    latency_ms: Percentiles  # from the sending of a unit to the arrival of its answer
    added_ms: Percentiles  # `latency_ms` without the worker's own time
    is_worker_time_known: bool  # if False, `added_ms` includes the worker's own time
    counts: Counts
    failures: Mapping[str, int]  # reasons and their numbers
    slots_left: int | None  # slots not free at the end; null with `--url`
    processes: Mapping[str, ProcessCost]
    generator: GeneratorCost
    problems: Sequence[str]  # why the row does not hold; empty if it does
    moves: Moves | None = None  # null without `--kill-every-s` and `--restart-every-s`
    exported_bytes: int | None = None  # bytes of spans; null without `--telemetry`
    page_bytes: int | None = None  # bytes of the streams; null without `--operator-pages`

    @property
    def holds(self) -> bool:
        """Whether the fabric held this load.

        Also False if the load generator was not punctual.
        """
        return not self.problems


@dataclass(frozen=True)
class Limits:
    """Upper limits of the 99th percentiles. A row above one of these limits does not hold."""

    added_ms: float
    lateness_ms: float  # of the generators


MAX_GAP_MS = 3000.0
"""Limit of the gap of a session whose worker is killed. Units may then be late, but not lost."""


def process_cost(
    samples: Sequence[ProcessSample], begin_s: float, end_s: float, units: int
) -> ProcessCost:
    """Compute the cost of a process. The first sample was taken before the first session."""
    window = [sample for sample in samples if begin_s <= sample.at_s <= end_s] or samples[-1:]
    used_s = window[-1].cpu_s - window[0].cpu_s
    lasted_s = window[-1].at_s - window[0].at_s
    # Corrects for the time that samples miss.
    of_all = (end_s - begin_s) / lasted_s if lasted_s else 1.0
    quarter = max(1, len(window) // 4)
    return ProcessCost(
        cpu_us_per_unit=round(used_s * of_all / units * 1e6, 1) if units else None,
        cpu_cores=round(used_s / lasted_s, 4) if lasted_s else 0.0,
        rss_before_mb=_median_mb(samples[:1]),
        rss_middle_mb=_median_mb(window[-2 * quarter : -quarter] or window),
        rss_end_mb=_median_mb(window[-quarter:]),
        rss_peak_mb=round(max(sample.rss_bytes for sample in samples) / _MB, 1),
    )


def _median_mb(samples: Sequence[ProcessSample]) -> float:
    return round(percentile([sample.rss_bytes for sample in samples], 0.5) / _MB, 1)


def generator_cost(seen: LoadFigures, cost: ProcessCost, limits: Limits) -> GeneratorCost:
    """Compute the cost of the load generators, and judge their punctuality."""
    lateness, loop = Percentiles.of(seen.lateness_ms), Percentiles.of(seen.loop_ms)
    worst = max(lateness.p99 or 0.0, loop.p99 or 0.0)
    return GeneratorCost(lateness, loop, cost, is_punctual=worst <= limits.lateness_ms)


def moves_of(stops: Sequence[Stop], timed: Sequence[Timed], *, is_killed: bool) -> Moves:
    """Compute the gaps of the sessions whose workers were stopped.

    A client cannot see whether the worker of its session was stopped. But a stop delays no other
    sessions. So after each stop, as many sessions as the worker had are chosen: those with the
    largest latencies.
    """
    answers = sorted(timed, key=lambda one: one.answered_s)
    times = [one.answered_s for one in answers]
    gaps_ms: list[float] = []
    for stop, following in pairwise([*stops, Stop(math.inf, 0)]):
        first_ms: dict[int, float] = {}
        for one in answers[bisect(times, stop.at_s) : bisect(times, following.at_s)]:
            first_ms.setdefault(one.session, one.latency_ms)
        gaps_ms += sorted(first_ms.values(), reverse=True)[: stop.session_count]
    sessions = sum(stop.session_count for stop in stops)
    return Moves(is_killed, len(stops), sessions, Percentiles.of(gaps_ms))


def problems(
    counts: Counts,
    added: Percentiles,
    generator: GeneratorCost,
    limits: Limits,
    moves: Moves | None = None,
) -> Sequence[str]:
    """Return why a row does not hold; empty if it does."""
    found: list[str] = []
    late = counts.late - counts.late_by_generator
    if not generator.is_punctual:
        found.append(f"invalid: the generator was over {limits.lateness_ms:g} ms late")
    if added.p99 is None:
        found.append("no unit was answered")
    elif moves and moves.is_killed:
        late = 0  # units of a killed worker are late
        if (moves.gap_ms.max or 0.0) > MAX_GAP_MS:
            found.append(f"gap over {MAX_GAP_MS / 1e3:g} s")
    elif added.p99 > limits.added_ms:
        found.append(f"p99 over {limits.added_ms:g} ms")
    for count, text in (
        (late, "late"),
        (counts.dropped, "dropped"),
        (counts.failed, "failed"),
        (counts.unanswered, "unanswered"),
        (counts.doubled, "answered twice"),
        (counts.unsent, "without a session"),
    ):
        if count:
            found.append(f"{count} units {text}")
    if counts.broken_sessions:
        found.append(f"{counts.broken_sessions} sessions broke")
    return found
