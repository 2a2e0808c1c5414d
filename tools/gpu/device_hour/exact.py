"""Compares, bit by bit, graphs with plain calls, and a conversation alone with one in company."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from device_hour.driver import OPTIONS
from device_hour.environment import load
from device_hour.session import Session
from duplane.tools.bench.report import show
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.types import UnitOutput


@dataclass
class Course:
    """One conversation: the outputs of its units, and the logits after the input of each unit."""

    logits: list[Tensor] = field(default_factory=list[Tensor])
    outputs: list[UnitOutput] = field(default_factory=list[UnitOutput])


class LogitsProbe(Probe):
    """Keeps the logits of one slot; None keeps nothing."""

    def __init__(self) -> None:
        self.slot: int | None = None
        self.seen: list[Tensor] = []

    def prefilled(self, slot: int, logits: Tensor, length: int) -> None:
        """Store a copy of the slot's logits."""
        del length
        if slot == self.slot:
            self.seen.append(logits.clone())


def load_uncaptured(session: Session) -> dict[str, Any]:
    """Load the model without graphs, and with a probe of the logits."""
    session.probe = LogitsProbe()
    return load(session, captures=False, warms_up=False)


def graphs(session: Session) -> dict[str, Any]:
    """Run a conversation with plain calls, capture the graphs, and run it again."""
    loaded = session.loaded(captures=False)
    most = loaded.model.slot_count - 1
    plain = {others: _course(session, 0, others) for others in (0, most)}
    session.loaded()
    found: dict[str, Any] = {"seconds": loaded.seconds}
    for others, course in plain.items():
        found[f"{others} others"] = differences(course, _course(session, 0, others))
        session.keep(found)
    _show("units that are equal with graphs and with plain calls", found)
    return found


def company(session: Session) -> dict[str, Any]:
    """Run a conversation alone, again, in another slot, and with more and more others."""
    last = session.loaded().model.slot_count - 1
    alone = _course(session, 0, 0)
    found: dict[str, Any] = {}
    middle = last // 2
    cases = ((0, 0), (last, 0), (0, 1), (middle, last // 8), (middle, middle), (middle, last))
    for slot, others in dict.fromkeys(cases):
        if not session.has_time():
            break
        found[f"slot {slot}, {others} others"] = differences(alone, _course(session, slot, others))
        session.keep(found)
    _show("units that are equal to those of the same conversation alone in slot 0", found)
    return found


def _course(session: Session, slot: int, others: int) -> Course:
    """Run the conversation with `others` conversations of noise, half of which only listen."""
    loaded, probe = session.loaded(captures=False), session.probe
    if not isinstance(probe, LogitsProbe):
        raise TypeError("the model was loaded without a probe of the logits")
    free = [number for number in range(loaded.model.slot_count) if number != slot]
    beside = sorted(np.random.default_rng(others).permutation(free)[:others].tolist())
    sounds, own = np.random.default_rng(7), np.random.default_rng(8)
    driver, course = loaded.driver, Course()
    probe.slot, probe.seen = slot, course.logits
    try:
        for each in (slot, *beside):
            seed = 0 if each == slot else 1 + each
            driver.open(each, replace(OPTIONS, seed=seed))
        for number in range(session.sizes.course):
            units = [driver.noise(slot, own, force_listen=number % 4 == 0)]
            units += [driver.noise(each, sounds, force_listen=each % 2 == 0) for each in beside]
            outputs = driver.units(units).outputs
            course.outputs += [output for output in outputs if output.slot == slot]
    finally:
        driver.close()
        probe.slot = None
    course.logits = [logits.cpu() for logits in course.logits]
    return course


def differences(one: Course, other: Course) -> dict[str, int | float]:
    """Count all units, and those with equal logits, ids and audio.

    Also return the largest error of the first logits that differ.
    """
    pairs = list(zip(one.logits, other.logits, strict=True))
    both = list(zip(one.outputs, other.outputs, strict=True))
    return {
        "units": len(both),
        "logits": sum(torch.equal(a, b) for a, b in pairs),
        "ids": sum(a.token_ids == b.token_ids for a, b in both),
        "audio": sum(np.array_equal(a.audio, b.audio) for a, b in both),
        "first_error": next(
            ((a - b).abs().max().item() for a, b in pairs if not torch.equal(a, b)), 0.0
        ),
    }


def _show(title: str, found: dict[str, Any]) -> None:
    rows = [
        (name, *(f"{value:.3g}" for value in counted.values()))
        for name, counted in found.items()
        if "units" in counted
    ]
    show(title, ("case", "of", "logits", "ids", "audio", "first error"), rows)
