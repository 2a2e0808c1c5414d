"""What becomes of a stage that fails: the units that make it fail are lost, the others go on.

A stage runs for several units together. Where it raises, each of them runs through it alone, from
the state that it began with, and gets what it would have got; only those that raise again are
lost. For that a stage must be one that can be run again until it has returned: rows it adds to a
cache lie behind what the cache counts, and whatever else it changes of a slot it changes last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from duplane.worker.model.cache import KVCache
from duplane.worker.model.types import UnitFailure

_log = logging.getLogger(__name__)

STAGE_FAILED = "STAGE_FAILED"


class Passenger(Protocol):
    """A unit on its way, as faults need it: `failure` is set where it is lost."""

    @property
    def slot(self) -> int: ...

    failure: UnitFailure | None


P = TypeVar("P", bound=Passenger)
R = TypeVar("R")


def attempt(
    stage: str,
    units: Sequence[P],
    call: Callable[[Sequence[P]], R],
    *,
    cache: KVCache | None = None,
) -> list[tuple[Sequence[P], R]]:
    """Call a stage for all units together, or, where that raises, for each alone.

    Returns what it returned, with those it was called for; the units left out have a `failure`.
    `cache` is one whose lengths the stage changes.
    """
    if not units:
        return []
    lengths = [(unit.slot, cache.length(unit.slot)) for unit in units] if cache else []
    try:
        return [(units, call(units))]
    except Exception:  # noqa: BLE001 - a stage's faults stop here, logged whole
        _log.exception("%s failed for slots %s", stage, [unit.slot for unit in units])
    # Outside of the handler, so that what the failed call held of the device is free again.
    if cache is not None:
        for slot, length in lengths:
            cache.rewind(slot, length)
    if len(units) == 1:
        units[0].failure = lost(units[0].slot, stage)
        return []
    return [done for unit in units for done in attempt(stage, [unit], call, cache=cache)]


def alone(stage: str, slot: int, call: Callable[[], R]) -> R | UnitFailure:
    """Call what concerns one slot only; its failure where that raises."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - as above
        _log.exception("%s failed for slot %d", stage, slot)
    return lost(slot, stage)


def lost(slot: int, stage: str) -> UnitFailure:
    """The failure of a unit, and of its conversation, that a stage could not run."""
    return UnitFailure(slot, STAGE_FAILED, f"the stage {stage!r} failed", is_fatal=True)


def each(done: Iterable[tuple[Sequence[P], Iterable[R]]]) -> list[tuple[P, R]]:
    """Every unit that got through, with its own of the results."""
    return [pair for units, results in done for pair in zip(units, results, strict=True)]


def alive(units: Sequence[P]) -> list[P]:
    """Those that nothing has failed for."""
    return [unit for unit in units if unit.failure is None]
