"""Matches the units of one session with their answers. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

DEADLINE_S = 1.0
"""An answer after more seconds than these is late, because the next unit is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A message of the server about a unit."""

    unit: int | None = None  # number of the unit; None means the oldest unit without an answer
    part: str = ""  # kind of message; each kind may arrive once per unit
    worker_ms: float | None = None  # the worker's own time, if the server reports it
    dropped_count: int = 0  # units dropped since the last answer
    is_dropped: bool = False  # whether the server dropped this unit
    failure: str = ""  # why the unit failed


@dataclass(slots=True)
class Counts:
    """Numbers of measured units, and of broken sessions."""

    sent: int = 0
    answered: int = 0
    late: int = 0  # answered, but after the deadline
    # These units are also in `late`. They were late only because the load generator was blocked.
    late_by_generator: int = 0
    dropped: int = 0  # units that the server has reported as dropped
    failed: int = 0  # answered with an error
    unanswered: int = 0
    doubled: int = 0  # surplus answers, also during the warm-up
    unsent: int = 0  # due while no session was open
    broken_sessions: int = 0  # ended too early or not opened, also during the warm-up

    def add(self, other: Counts) -> None:
        """Add other counts to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True, slots=True)
class Timed:
    """An answered unit: milliseconds to its answer, and the worker's own milliseconds if known."""

    latency_ms: float
    worker_ms: float | None
    session: int = 0  # number in the plan, from 0
    answered_s: float = 0.0  # monotonic time

    @property
    def added_ms(self) -> float:
        """The time that the fabric added to the worker's own time."""
        return self.latency_ms - (self.worker_ms or 0.0)


@dataclass(slots=True)
class _Unit:
    number: int
    sent_s: float
    is_measured: bool
    answered_s: float = 0.0
    worker_ms: float | None = None
    parts: tuple[str, ...] = ()


class Ledger:
    """The units of one session, which has the number `session` in the plan.

    `stalled_s` returns how long the load generator was blocked between two times.
    """

    def __init__(
        self, counts: Counts, stalled_s: Callable[[float, float], float], session: int = 0
    ) -> None:
        self.timed: list[Timed] = []  # a reader may clear this list
        self._counts = counts
        self._stalled_s = stalled_s
        self._session = session
        self._waiting: dict[int, _Unit] = {}  # oldest first
        self._current: _Unit | None = None  # an answered unit, about which more messages may arrive

    @property
    def has_waiting(self) -> bool:
        """Whether a unit has no answer yet."""
        return bool(self._waiting)

    def sent(self, number: int, at_s: float, *, is_measured: bool) -> None:
        """Record that a unit is sent."""
        self._waiting[number] = _Unit(number, at_s, is_measured)
        self._counts.sent += is_measured

    def answered(self, answer: Answer, at_s: float) -> None:
        """Record a message of the server."""
        if answer.unit is not None and answer.unit not in self._waiting:
            self._continue(answer, at_s)
            return
        self._drop(answer)
        number = next(iter(self._waiting), None) if answer.unit is None else answer.unit
        if number is None:
            self._counts.doubled += 1
            return
        unit = self._waiting.pop(number)
        self._finish()
        if answer.is_dropped:
            self._counts.dropped += unit.is_measured
        elif answer.failure:
            self._counts.failed += unit.is_measured
        else:
            self._current = unit
            self._add(answer, at_s, unit)

    def end(self) -> None:
        """End the session: units without an answer count as unanswered."""
        self._finish()
        self._counts.unanswered += sum(unit.is_measured for unit in self._waiting.values())
        self._waiting.clear()

    def _drop(self, answer: Answer) -> None:
        """Remove the oldest units before the answered one: the server has dropped them."""
        for unit in list(self._older(answer.unit))[: answer.dropped_count]:
            del self._waiting[unit.number]
            self._counts.dropped += unit.is_measured

    def _older(self, number: int | None) -> Iterator[_Unit]:
        return (unit for unit in self._waiting.values() if number is None or unit.number < number)

    def _continue(self, answer: Answer, at_s: float) -> None:
        """Add a further message to the unit answered last.

        The message counts as surplus if it repeats a part or belongs to another unit.
        """
        unit = self._current
        if unit is None or unit.number != answer.unit or answer.part in unit.parts:
            self._counts.doubled += 1
        else:
            self._add(answer, at_s, unit)

    def _add(self, answer: Answer, at_s: float, unit: _Unit) -> None:
        unit.answered_s = at_s
        unit.parts = (*unit.parts, answer.part)
        if answer.worker_ms is not None:
            unit.worker_ms = answer.worker_ms

    def _finish(self) -> None:
        """Count the unit that was answered last: no more messages about it will arrive."""
        unit, self._current = self._current, None
        if unit is None or not unit.is_measured:
            return
        latency_s = unit.answered_s - unit.sent_s
        self._counts.answered += 1
        self.timed.append(Timed(latency_s * 1e3, unit.worker_ms, self._session, unit.answered_s))
        if latency_s > DEADLINE_S:
            self._counts.late += 1
            own_s = self._stalled_s(unit.sent_s, unit.answered_s)
            self._counts.late_by_generator += latency_s - own_s <= DEADLINE_S
