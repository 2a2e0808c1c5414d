"""Checks that every unit of a resumable call is answered once and in order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Faults:
    """What must not happen to a call."""

    calls_lost: int = 0
    units_lost: int = 0
    units_doubled: int = 0
    out_of_order: int = 0
    units_dropped: int = 0  # by the server, which says so

    def add(self, other: Faults) -> None:
        """Add other counts to these."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass
class Units:
    """The units of one call. Each append is one unit, so the n-th append is the unit n.

    With `context` of the first unit and `step` of each further one, the size of the context shows
    whether the model has heard every unit once; with a `step` of 0 this is not checked.
    """

    context: int = 0
    step: int = 0
    faults: Faults = field(default_factory=Faults)
    latencies_s: list[float] = field(default_factory=list[float])
    answers_s: list[float] = field(default_factory=list[float])
    """From each return to the first event of a unit, or from its unit if that was sent later."""
    has_last: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the last unit that was sent has an answer."""
    _sent_s: list[float] = field(default_factory=list[float])
    _unit: int = -1
    _part: int = -1
    _returned_s: float | None = None
    _left_out: int = 0  # units that the client could not send again
    lost_count: int = 0
    """How many units the client could not send again at this return, if all others are answered."""

    @property
    def sent_count(self) -> int:
        """The number of units that were sent."""
        return len(self._sent_s)

    def sent(self, now_s: float) -> None:
        """Note that a unit is sent."""
        self._sent_s.append(now_s)
        self.has_last.clear()

    def resumed(self, unit: int, next_unit: int) -> None:
        """Note what the server says: its last unit, and the next one that the client must send.

        The client may also lose input that it has sent, and that the server never received.
        """
        self.lost_count = next_unit - (unit + 1) - self.faults.units_dropped - self._left_out

    def returned(self, now_s: float, lost_count: int = 0) -> None:
        """Note that the client is back. It could not send `lost_count` units again."""
        self._returned_s = now_s
        self._left_out += lost_count
        del self._sent_s[self._unit + 1 : self._unit + 1 + lost_count]
        if self._unit + 1 >= len(self._sent_s):
            self.has_last.set()

    def event(self, unit: int, part: int, context: int, dropped: int, now_s: float) -> None:
        """Check an event about a unit."""
        if self._returned_s is not None:
            asked_s = self._sent_s[unit] if unit < len(self._sent_s) else 0.0
            self.answers_s.append(now_s - max(self._returned_s, asked_s))
            self._returned_s = None
        self.faults.units_dropped += dropped
        if (unit, part) == (self._unit, self._part + 1):
            self._part = part
            return
        if unit <= self._unit:
            self.faults.units_doubled += part <= self._part or unit < self._unit
            self.faults.units_lost += unit == self._unit and part > self._part + 1
            return
        self.faults.units_lost += unit - self._unit - 1 + (part > 0)
        self._unit, self._part = unit, part
        if unit + 1 >= len(self._sent_s):
            self.has_last.set()
        if unit < len(self._sent_s):
            self.latencies_s.append(now_s - self._sent_s[unit])
        else:
            self.faults.units_doubled += 1  # nothing was sent for it
        heard = unit - self.faults.units_dropped  # before this one
        if self.step and context != self.context + self.step * heard:
            self.faults.out_of_order += 1

    def end(self) -> Faults:
        """Return the faults of a call that has ended.

        Units without an answer are lost, unless the server has said that it dropped them.
        """
        missing = self.faults.units_lost + max(0, len(self._sent_s) - self._unit - 1)
        self.faults.units_lost = max(0, missing - self.faults.units_dropped)
        return self.faults
