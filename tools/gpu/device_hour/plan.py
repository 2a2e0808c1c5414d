"""The groups of stages, the most useful first, and their planned seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from device_hour import crowd, environment, exact, host, lanes, profiling, smoke, together
from device_hour.costs import costs
from device_hour.session import Session

GROUP_S = 540.0
"""The most seconds of a group."""
HOUR_S = 2700.0
"""The most seconds of all groups."""


@dataclass(frozen=True)
class Stage:
    """A stage: after `planned_s` it begins no further measurement, after `deadline_s` it is ended.

    A stage that `is_setup` runs before any other stage of its group in each process.
    """

    name: str
    run: Callable[[Session], dict[str, Any]]
    planned_s: float
    deadline_s: float
    is_setup: bool = False


GROUPS: Mapping[str, Sequence[Stage]] = {
    "contact": (
        Stage("environment", environment.environment, 30, 90),
        Stage("checkpoint", environment.checkpoint, 70, 240),
        Stage("plan", environment.memory_plan, 10, 60),
        Stage("load", environment.load, 100, 270, is_setup=True),
        Stage("smoke", smoke.smoke, 30, 120),
        Stage("together", together.together, 60, 120),
        Stage("traces", environment.traces, 90, 180),
    ),
    "costs": (
        Stage("load", environment.load, 100, 270, is_setup=True),
        Stage("costs", costs, 220, 280),
        Stage("host", host.host, 30, 90),
        Stage("profile", profiling.profiled, 40, 120),
        Stage("contention", lanes.contention, 50, 120),
    ),
    "crowd": (
        Stage("load", partial(environment.load, warms_up=False), 80, 270, is_setup=True),
        Stage("crowd", crowd.crowd, 390, 430),
    ),
    "exact": (
        Stage("load", exact.load_uncaptured, 60, 240, is_setup=True),
        Stage("graphs", exact.graphs, 120, 270),
        Stage("company", exact.company, 120, 180),
    ),
}


def shown() -> str:
    """Return the plan as text."""
    lines: list[str] = []
    for group, stages in GROUPS.items():
        lines.append(f"{group:<10} {planned_s(group):>6.0f} s")
        lines += [
            f"  {stage.name:<14} {stage.planned_s:>4.0f} s, at most {stage.deadline_s:.0f} s"
            for stage in stages
        ]
    total = sum(map(planned_s, GROUPS))
    return "\n".join((*lines, f"{'all':<10} {total:>6.0f} s, at most {HOUR_S:.0f} s"))


def planned_s(group: str) -> float:
    """Return the planned seconds of a group."""
    return sum(stage.planned_s for stage in GROUPS[group])
