"""What the sessions of an edge share to move: memory, and permits to rebuild. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from duplane.edge.session.journal import JournalSpace
from duplane.edge.session.moving import Move


class Turns:
    """Limits how many moves rebuild conversations at the same time.

    A move may begin to rebuild when it has a permit, here called its turn. Moves get permits in the
    order in which they ask.
    """

    def __init__(self, count: int) -> None:
        self._free_count = count
        self._waiting: dict[Move, Callable[[], None]] = {}

    def enter(self, move: Move, on_turn: Callable[[], None]) -> None:
        """Call `on_turn` when the move gets its permit, perhaps immediately."""
        self._waiting[move] = on_turn
        self._give()

    def leave(self, move: Move) -> None:
        """Take back the permit of a move, or end its wait for a permit."""
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
    """The parts that the sessions of an edge share."""

    journals: JournalSpace
    turns: Turns
