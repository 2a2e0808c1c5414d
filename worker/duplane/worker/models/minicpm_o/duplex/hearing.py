"""Which units a conversation has heard, and which of them a rebuild must hear again. Pure.

The sound of a unit is encoded with the units before it: the audio encoder begins anew after each
`period` units with sound, and the floor of the mel depends on a history of `HISTORY_UNITS` units,
which drops its oldest `DROPPED_UNITS` at once. A rebuild that begins to hear at a later unit has
the same state as the conversation if it begins at a unit where the history drops its oldest units,
and after the first drop; the encoder must begin at a unit where it has begun a period.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from duplane.worker.models.minicpm_o.audio.mel import (
    DROPPED_SAMPLES,
    HISTORY_SAMPLES,
    UNIT_SAMPLES,
)

HISTORY_UNITS = HISTORY_SAMPLES // UNIT_SAMPLES
DROPPED_UNITS = DROPPED_SAMPLES // UNIT_SAMPLES
WARM_UNITS = HISTORY_UNITS - 1
"""Number of units after which a history that was empty drops its oldest units first."""


class HearingError(ValueError):
    """The sound of past units is not enough. The message says why."""


@dataclass
class Hearing:
    """The units with sound of one conversation. Numbers of units count from 0.

    - `period`: the number of units with sound that the audio encoder encodes together.
    - `count`: the number of units with sound so far.
    - `is_regular`: every sound so far had the length of a unit. Otherwise the borders of the units
      in the sound are unknown to a rebuild that does not hear all of them.
    - `is_encoding`: the sound of the next unit is encoded as in the original conversation.
    """

    period: int
    count: int = 0
    is_regular: bool = True
    is_encoding: bool = field(default=False, init=False)
    _first: int | None = field(default=None, init=False)  # heard here, among the units with sound
    _numbers: deque[int] = field(init=False)  # of the latest units with sound

    def __post_init__(self) -> None:
        self._numbers = deque(maxlen=self.period + WARM_UNITS + DROPPED_UNITS)

    def push(self, sample_count: int) -> None:
        """Record that a unit has brought samples, perhaps too few."""
        self.is_regular &= sample_count == UNIT_SAMPLES

    def take(self, number: int) -> None:
        """Record that the unit `number` is heard. Raises `HearingError` if this is too late."""
        if self._first is None:
            if self.count % DROPPED_UNITS:
                raise HearingError(f"the sound cannot begin at the sound of number {self.count}")
            self._first = self.count
        begins_period = self.count % self.period == 0
        self.is_encoding |= begins_period and self.count >= self._warm_from(self._first)
        self._add(number)

    def skip(self, number: int) -> None:
        """Record a unit whose sound is not heard. Raises `HearingError` after a heard unit."""
        if self._first is not None:
            raise HearingError("the sound is missing")
        self._add(number)

    @property
    def is_ready(self) -> bool:
        """Whether the sound of the next unit will be encoded as in the original conversation."""
        if self.is_encoding or not self.count:
            return True
        is_warm = self._first is not None and self.count >= self._warm_from(self._first)
        return is_warm and self.count % self.period == 0

    def units_before(self, number: int) -> int:
        """Return how many units before the unit `number`, the latest one, must be heard again.

        Then its sound, or that of the next unit with sound, is encoded as in this conversation.
        """
        has_sound = bool(self._numbers) and self._numbers[-1] == number
        index = self.count - has_sound
        begin = index // self.period * self.period - WARM_UNITS
        begin = max(0, begin) // DROPPED_UNITS * DROPPED_UNITS
        if begin == self.count:
            return 0
        return number - self._numbers[begin - self.count]

    def _add(self, number: int) -> None:
        self._numbers.append(number)
        self.count += 1

    @staticmethod
    def _warm_from(first: int) -> int:
        return first + WARM_UNITS if first else 0
