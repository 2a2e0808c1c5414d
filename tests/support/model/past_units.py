"""Runs units of a conversation, and rebuilds the conversation in another slot from the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import PastUnit, Rebuilt, Unit, UnitOutput


@dataclass(frozen=True, kw_only=True)
class RanUnit(UnitOutput):
    """The output of a unit, with the unit."""

    unit: Unit


def run_unit(model: DuplexModel, unit: Unit) -> RanUnit:
    """Run and settle one unit."""
    (result,) = model.step([unit])
    assert isinstance(result, UnitOutput), result
    assert not model.settle([unit.slot])
    return RanUnit(**vars(result), unit=unit)


def past_units(slot: int, outputs: Sequence[RanUnit]) -> list[PastUnit]:
    """Return outputs as past units for `slot`."""
    return [
        PastUnit(
            replace(output.unit, slot=slot, force_listen=False),
            output.token_ids,
            output.state,
            output.context_length,
        )
        for output in outputs
    ]


def rebuild(model: DuplexModel, slot: int, units: Sequence[PastUnit]) -> list[Rebuilt]:
    """Rebuild a conversation in `slot`; return the result of each call of `model.rebuild`."""
    shares: list[Rebuilt] = []
    while not (shares and shares[-1].is_complete):
        result = model.rebuild(slot, units)
        assert isinstance(result, Rebuilt), result
        units = units[result.unit_count :]
        shares.append(result)
    return shares


def assert_same_units(got: Sequence[UnitOutput], want: Sequence[UnitOutput]) -> None:
    """Assert that two lists of outputs have the same token ids, speech tokens and samples."""
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.change == theirs.change
        assert ours.context_length == theirs.context_length
        assert (ours.is_listen, ours.end_of_turn) == (theirs.is_listen, theirs.end_of_turn)
        assert np.array_equal(ours.audio, theirs.audio)
