"""The memory, and the permits to rebuild, that the sessions of an edge share for moves. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from duplane.edge.session.slot import Slot
from duplane.fabric.journal import JournalSpace


class RebuildPermits:
    """Limits how many moves rebuild conversations at the same time.

    A move has one permit, which it requests for its next slot. Permits are given in the order in
    which they are requested.
    """

    def __init__(self, count: int) -> None:
        self.free_count = count
        self._waiting: dict[Slot, Callable[[], None]] = {}
        self._given: set[Slot] = set()

    def request(self, slot: Slot, on_given: Callable[[], None]) -> None:
        """Request a permit. Call `on_given` when it is given, perhaps immediately."""
        self._waiting[slot] = on_given
        self._give()

    def give_back(self, slot: Slot) -> None:
        """Take the permit of a slot back, or remove the request for it."""
        self._waiting.pop(slot, None)
        if slot in self._given:
            self._given.discard(slot)
            self.free_count += 1
            self._give()

    def _give(self) -> None:
        while self.free_count and self._waiting:
            slot = next(iter(self._waiting))
            on_given = self._waiting.pop(slot)
            self.free_count -= 1
            self._given.add(slot)
            on_given()


def _new_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Continuity:
    """What the sessions of an edge share for their moves.

    Without `journals`, the sessions keep none, and each ends with its worker.
    """

    journals: JournalSpace | None
    permits: RebuildPermits
    # Returns the seed of a session whose client has set none.
    new_seed: Callable[[], int] = _new_seed


NO_CONTINUITY = Continuity(None, RebuildPermits(0))
