"""Estimates how a client plays a turn of speech while it still receives the turn. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """The arrival of one delta of speech.

    `gap_s` is the time since the previous delta of the turn; it is None for the first delta.
    `stalled_s` is the time for which the client had nothing to play before this delta.
    """

    gap_s: float | None
    stalled_s: float


class Playout:
    """The client's buffer of speech.

    The client starts to play a turn `delay_s` after its first delta.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._last_s: float | None = None  # when the turn's last delta arrived
        self._plays_until_s = 0.0

    def add(self, audio_s: float, now_s: float) -> Arrival:
        """Add `audio_s` seconds of speech."""
        if self._last_s is None:
            arrival = Arrival(None, 0.0)
            self._plays_until_s = now_s + self._delay_s
        else:
            arrival = Arrival(now_s - self._last_s, max(0.0, now_s - self._plays_until_s))
        self._plays_until_s = max(self._plays_until_s, now_s) + audio_s
        self._last_s = now_s
        return arrival

    def end_turn(self) -> None:
        """End the turn. The next speech begins a new turn."""
        self._last_s = None
