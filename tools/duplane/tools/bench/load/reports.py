"""What generators see, as they report it once a second, and the sum of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from duplane.tools.bench.load.ledger import Counts, Timed


@dataclass(frozen=True)
class Opening:
    """The sessions that a generator has opened before it sends."""

    count: int
    failures: Mapping[str, int]  # reasons of the others, each with how often it came


@dataclass
class Report:
    """What one generator saw since its last report; counts and failures since its start."""

    timed: list[Timed] = field(default_factory=list[Timed])
    lateness_ms: list[float] = field(default_factory=list[float])  # of each unit's sending
    loop_ms: list[float] = field(default_factory=list[float])  # delays of the event loop
    counts: Counts = field(default_factory=Counts)
    failures: Mapping[str, int] = field(default_factory=dict[str, int])  # by reason
    done: bool = False  # nothing follows


class Seen:
    """What all generators saw so far."""

    def __init__(self) -> None:
        self.timed: list[Timed] = []
        self.lateness_ms: list[float] = []
        self.loop_ms: list[float] = []
        self._latest: dict[int, Report] = {}  # by generator

    @property
    def counts(self) -> Counts:
        """The counts of all."""
        total = Counts()
        for report in self._latest.values():
            total.add(report.counts)
        return total

    @property
    def failures(self) -> Mapping[str, int]:
        """The reasons of failures, each with how often it came."""
        total = Counter[str]()
        for report in self._latest.values():
            total.update(report.failures)
        return dict(total)

    def add(self, generator: int, report: Report) -> None:
        """Add a report of a generator."""
        self._latest[generator] = report
        self.timed += report.timed
        self.lateness_ms += report.lateness_ms
        self.loop_ms += report.loop_ms
