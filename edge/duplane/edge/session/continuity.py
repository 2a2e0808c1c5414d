"""The memory, and the permits to rebuild, that the sessions of an edge share for moves. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from duplane.edge.session.journal import JournalSpace
from duplane.edge.session.moving import Move


class Turns:
    """Limits how many moves rebuild conversations at the same time.

    A move may rebuild only while it has a permit. Moves get permits in the order in which they ask.
    """

    def __init__(self, count: int) -> None:
        self._free_count = count
        self._waiting: dict[Move, Callable[[], None]] = {}

    def enter(self, move: Move, on_turn: Callable[[], None]) -> None:
        """Request a permit for a move. Call `on_turn` when the move has it, perhaps immediately."""
        self._waiting[move] = on_turn
        self._give()

    def leave(self, move: Move) -> None:
        """Take the permit back from a move, or remove a move that waits for a permit."""
        self._waiting.pop(move, None)
        if move.has_turn:
            move.has_turn = False
            self._free_count += 1
            self._give()

    def _give(self) -> None:
        while self._free_count and self._waiting:
            move = next(iter(self._waiting))
            on_turn = self._waiting.pop(move)
            self._free_count -= 1
            move.has_turn = True
            on_turn()


@dataclass(frozen=True, slots=True)
class Continuity:
    """The memory and the permits that the sessions of an edge share."""

    journals: JournalSpace
    turns: Turns
