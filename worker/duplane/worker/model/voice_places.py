"""Which voice lies at which of a few places; the one unused for longest gives way.

Pure: what lies there, and what it costs to put it back, is the vocoder's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class VoicePlaces:
    """A bounded, least recently used mapping of voices to the places 0 .. count - 1."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"count is {count}, less than 1")
        self._free = list(reversed(range(count)))
        self._held: OrderedDict[Hashable, int] = OrderedDict()

    def find(self, voice: Hashable) -> int | None:
        """Where the voice lies, which is a use of it; None if it does not."""
        place = self._held.get(voice)
        if place is not None:
            self._held.move_to_end(voice)
        return place

    def take(self) -> int:
        """A place that no voice holds; the voice unused for longest loses its own if it must."""
        return self._free.pop() if self._free else self._held.popitem(last=False)[1]

    def hold(self, voice: Hashable, place: int) -> None:
        """Let the voice lie at a place that was taken."""
        self._held[voice] = place

    def leave(self, place: int) -> None:
        """Give a place back that was taken."""
        self._free.append(place)
