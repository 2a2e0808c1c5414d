"""Finds the stage that made a unit late. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

from duplane.fabric.monitoring import spans
from duplane.tools.trace.units import NETWORK, Unit, UnitStage

_MEANINGS = {
    ("edge", spans.READ): "the message waited in the edge",
    ("edge", spans.PARSE): "the edge parsed the message",
    ("edge", spans.QUEUE): "the unit waited for the stream to the worker",
    ("edge", spans.SEND): "the stream accepted the unit",
    ("edge", spans.MOVE): "the session moved to another worker",
    ("edge", spans.RENDER): "the edge rendered the events",
    ("edge", spans.WRITE): "the client's connection accepted the events",
    (NETWORK, "there"): "the network carried the unit to the worker",
    (NETWORK, "back"): "the network carried the delta to the edge",
    ("worker", spans.PREPARE): "the worker decoded the pictures",
    ("worker", spans.INBOX): "the unit waited for earlier units of the conversation",
    ("worker", spans.SETTLE): "the previous unit of the conversation was settled",
    ("worker", spans.DEVICE): "the device was busy with other conversations",
    ("worker", spans.RUN): "the model ran parts that have no stage of their own",
    ("worker", "unknown"): "the worker has sent no stages of the unit",
    ("worker", spans.DELIVER): "the worker's event loop passed on the delta",
}
# Stages in which a unit waits for a move.
_MOVING = frozenset((("edge", spans.QUEUE), ("edge", spans.SEND), ("edge", spans.MOVE)))
Usual = Mapping[tuple[str, str, str], float]
"""Usual milliseconds of each stage, by outcome of the unit, place and name of the stage."""


def usual_times(units: Iterable[Unit]) -> Usual:
    """Return the median time of each stage, over all units that were not late."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for unit in units:
        if not unit.is_late:
            for stage in unit.stages():
                found[unit.outcome, stage.place, stage.name].append(stage.lasted_ms)
    return {key: statistics.median(times) for key, times in found.items()}


def slowest_stage(unit: Unit, usual: Usual) -> UnitStage | None:
    """Return the stage whose time exceeds its usual time by the most."""

    def excess_ms(stage: UnitStage) -> float:
        return stage.lasted_ms - usual.get((unit.outcome, stage.place, stage.name), 0.0)

    return max(unit.stages(), key=excess_ms, default=None)


def verdict(unit: Unit, usual: Usual) -> str:
    """Return the state of a unit (on time, late, failed or dropped) and its slowest stage."""
    stage = slowest_stage(unit, usual)
    if stage is None:
        where = "no stage is known"
    else:
        key = (unit.outcome, stage.place, stage.name)
        meaning = _MEANINGS.get(key[1:])
        if unit.move and key[1:] in _MOVING:
            meaning = f"the session moved {unit.move}"
        where = f"{stage.place} {stage.name} {stage.lasted_ms:.1f} ms"
        where += f" (usually {usual[key]:.1f} ms)" if key in usual else ""
        where += f": {meaning}" if meaning else ""
    state = unit.outcome if unit.outcome in (spans.DROPPED, spans.FAILED) else "on time"
    if unit.is_late:
        state = f"late, {state}" if state != "on time" else "late"
    error = f" ({unit.error})" if unit.error else ""
    return f"{state}{error}, {where}"
