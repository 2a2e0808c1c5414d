"""Predicts the latency of a number of conversations from the costs alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from duplane.tools.bench.schedule.costs import Costs, Size, launch_ms
from duplane.tools.bench.schedule.traffic import UNIT_ROWS
from duplane.worker.engine.schedule import Block, Limits

CONTEXT_ROWS = 3900
_LONGEST_ROWS = 6500
_ROUNDS = 200
_MOST_PASS_MS, _MOST_CYCLE_MS = 500.0, 5000.0


@dataclass(frozen=True)
class Estimate:
    """What two lanes are expected to need, in milliseconds.

    `pass_ms` is the time between two passes, `cycle_ms` that of the speech of one unit, and
    `p99_ms` the latency of speaking units.
    """

    pass_ms: float
    cycle_ms: float
    p99_ms: float


def predict(costs: Costs, sessions: int, speaking: float, tokens: float) -> Estimate:
    """Return the estimate for conversations of which the share `speaking` speaks.

    `tokens` is the mean number of ids of a spoken unit. The more units a lane has at a time, the
    longer its launches take, and the more units come meanwhile: the estimate is where both agree.
    """
    limits = Limits()
    spoken_per_ms, units_per_ms = sessions * speaking / 1e3, sessions / 1e3
    pass_ms, cycle_ms = 6.0, 40.0
    for _ in range(_ROUNDS):
        steps = min(64.0, spoken_per_ms * tokens * pass_ms)
        begins = units_per_ms * pass_ms
        fed = launch_ms(costs, _pass_size(steps, begins))
        heard = (1 - math.exp(-begins)) * launch_ms(costs, Size(Block.HEAR, max(1, round(begins))))
        speakers = max(1.0, 1.15 * spoken_per_ms * cycle_ms)
        chunks = max(1, round(min(limits.vocode, speakers)))
        launches = max(1.0, speakers / limits.vocode)
        spoken = launch_ms(costs, Size(Block.TALK, math.ceil(speakers)))
        spoken += launches * launch_ms(costs, Size(Block.VOCODE, chunks))
        pass_ms += 0.3 * (min(costs.contention * (fed + heard), _MOST_PASS_MS) - pass_ms)
        cycle_ms += 0.3 * (min(costs.contention * spoken, _MOST_CYCLE_MS) - cycle_ms)
    return Estimate(pass_ms, cycle_ms, (tokens + 5) * pass_ms + 2.2 * cycle_ms)


def _pass_size(steps: float, begins: float) -> Size:
    slots = max(1, round(steps + begins))
    longest = _LONGEST_ROWS if slots > 1 else CONTEXT_ROWS
    contexts = (longest, *((CONTEXT_ROWS,) * (slots - 1)))
    rows = max(1, round(steps + UNIT_ROWS * begins))
    return Size(Block.PASS, rows, contexts, fills=True)
