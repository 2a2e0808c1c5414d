"""Runs sessions through the worker's model, several at the same time, faster than real time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from duplane.tools.train.evaluation.scores import Answered
from duplane.worker.model.audio.mel import UNIT_SAMPLES
from duplane.worker.model.model import DuplexModel
from duplane.worker.model.types import (
    ConversationOptions,
    FloatArray,
    Unit,
    UnitFailure,
)

CONTEXT_ROWS = 1024


def run_sessions(
    model: DuplexModel, sounds: Sequence[FloatArray], options: ConversationOptions
) -> list[list[Answered]]:
    """Return the outputs of all units of each session. Raises RuntimeError if a unit fails."""
    answered: list[list[Answered]] = []
    for start in range(0, len(sounds), model.slot_count):
        answered += _run_together(model, sounds[start : start + model.slot_count], options)
    return answered


def _run_together(
    model: DuplexModel, sounds: Sequence[FloatArray], options: ConversationOptions
) -> list[list[Answered]]:
    slots = range(len(sounds))
    found: list[list[Answered]] = [[] for _ in slots]
    for slot in slots:
        model.open(slot, options)
    try:
        for begin in range(0, len(sounds[0]), UNIT_SAMPLES):
            units = [
                Unit(slot, np.ascontiguousarray(sound[begin : begin + UNIT_SAMPLES]))
                for slot, sound in enumerate(sounds)
            ]
            for output in model.step(units):
                if isinstance(output, UnitFailure):
                    raise RuntimeError(f"{output.reason}: {output.message}")
                speaks = not output.is_listen
                found[output.slot].append(Answered(speaks, output.text, output.end_of_turn))
            model.settle(slots)
    finally:
        for slot in slots:
            model.close(slot)
    return found
