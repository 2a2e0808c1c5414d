"""Keeps the units of a conversation as an edge does, and gives them back to a model."""

from __future__ import annotations

from collections.abc import Sequence

from support.model.past_units import RanUnit

from duplane.fabric.past_units import PastUnits
from duplane.tools.bench import kept_units
from duplane.worker.models.types import PastUnit


def kept(outputs: Sequence[RanUnit], begin: int | None = None, windows: int = 2) -> PastUnits:
    """Return the past units of a conversation after its last unit.

    A rebuild feeds them from `begin` on, by default from the unit that keeps so many `windows`.
    """
    units = PastUnits()
    for output in outputs:
        units.append(kept_units.kept_unit(output.unit, output))
        if begin is None:
            units.drop_before(next(units.begins(windows)))
    if begin is not None:
        units.drop_before(begin)
    return units


def given_back(slot: int, units: PastUnits, outputs: Sequence[RanUnit]) -> list[PastUnit]:
    """Return the past units as the worker gives them to the model."""
    return [
        kept_units.given_back(slot, past, output.unit)
        for past, output in zip(units.units, outputs, strict=True)
    ]
