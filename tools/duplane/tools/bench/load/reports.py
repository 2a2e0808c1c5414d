"""The reports that load generators send once a second, and their sum. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from duplane.tools.bench.load.ledger import Counts, Timed


@dataclass(frozen=True)
class Opening:
    """The number of sessions that a load generator has opened before it sends."""

    count: int
    failures: Mapping[str, int]  # why other sessions did not open; reason -> number


@dataclass
class Report:
    """The figures of one load generator.

    Times and delays are those since the last report; counts and failures are those since the start.
    """

    timed: list[Timed] = field(default_factory=list[Timed])
    lateness_ms: list[float] = field(default_factory=list[float])  # delay of each unit's sending
    loop_ms: list[float] = field(default_factory=list[float])  # delays of the event loop
    counts: Counts = field(default_factory=Counts)
    failures: Mapping[str, int] = field(default_factory=dict[str, int])  # numbers by reason
    done: bool = False  # this is the last report


class LoadFigures:
    """The figures of all generators so far."""

    def __init__(self) -> None:
        self.timed: list[Timed] = []
        self.lateness_ms: list[float] = []
        self.loop_ms: list[float] = []
        self._latest: dict[int, Report] = {}  # key: number of the generator
        self._recent = Report()

    @property
    def counts(self) -> Counts:
        """The counts of all generators."""
        total = Counts()
        for report in self._latest.values():
            total.add(report.counts)
        return total

    @property
    def failures(self) -> Mapping[str, int]:
        """The reasons of failures and their numbers."""
        total = Counter[str]()
        for report in self._latest.values():
            total.update(report.failures)
        return dict(total)

    def add(self, generator: int, report: Report) -> None:
        """Add a report of a generator."""
        self._latest[generator] = report
        for sums in (self, self._recent):
            sums.timed += report.timed
            sums.lateness_ms += report.lateness_ms
            sums.loop_ms += report.loop_ms

    def take_recent(self) -> Report:
        """Return the times and delays since the last call, without counts and failures."""
        recent, self._recent = self._recent, Report()
        return recent
