"""`duplane bench schedule`: the latencies of conversations on a device that is only described."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from duplane.tools.bench.options import ScheduleBench
from duplane.tools.bench.report import percentile, show
from duplane.tools.bench.schedule.costs import (
    BUILT_IN,
    TF32_VOCODER_MS,
    Costs,
    read_costs,
)
from duplane.tools.bench.schedule.prediction import predict
from duplane.tools.bench.schedule.simulation import (
    LATE_S,
    Outcome,
    Simulation,
    is_ordinary,
    is_spoken,
)
from duplane.tools.bench.schedule.traffic import MEAN_IDS, Task, Traffic, mixed, tasks
from duplane.tools.command import EXIT_FAILED
from duplane.worker.engine.schedule import Limits
from duplane.worker.session_capacity import SessionCapacity
from duplane.worker.settings import GPU_LATENCY_LIMIT_S

_HEADER = (
    "seed",
    "units",
    "p50",
    "p95",
    "p99",
    "max",
    "listen p50",
    "p99",
    "speak p50",
    "p99",
    "first sound p50",
    "p99",
    "large",
    "p99",
    "late",
    "busy %",
)


def bench_schedule(options: ScheduleBench) -> int:
    """Print a table with one row for each seed; return 1 if an ordinary unit was late.

    Raises CostsError.
    """
    costs = costs_of(options)
    kind = mixed if options.mixed else Traffic
    traffic = kind(options.sessions, options.speaking, options.seconds)
    lines = (
        "SIMULATED: the engine's schedule in virtual time; nothing was measured on a GPU.",
        _described(options, costs),
        _estimated(options, costs),
        "",
    )
    sys.stdout.write("\n".join(lines))
    outcomes = [
        simulate(costs, traffic, lanes=options.lanes, seed=seed)
        for seed in range(1, options.seeds + 1)
    ]
    rows = [_row(str(seed), outcome) for seed, outcome in enumerate(outcomes, start=1)]
    show("latency of units in milliseconds", _HEADER, rows)
    p99 = statistics.median(
        percentile(outcome.latencies(is_ordinary), 0.99) for outcome in outcomes
    )
    late = sum(outcome.late for outcome in outcomes)
    sys.stdout.write(_admitted(options, outcomes[0]))
    sys.stdout.write(f"median p99 {1e3 * p99:.0f} ms, {late} units later than {LATE_S:.0f} s\n")
    return EXIT_FAILED if late else 0


def simulate(costs: Costs, traffic: Traffic, *, lanes: Literal[1, 2], seed: int) -> Outcome:
    """Run this load once, with the limits of launches that a worker has."""
    arrivals = tasks(traffic, random.Random(seed))
    return Simulation(costs, arrivals, Limits(), lanes=lanes, seed=seed).run()


def costs_of(options: ScheduleBench) -> Costs:
    """Return the costs that the flags name. Raises CostsError."""
    costs = BUILT_IN.get(options.costs)
    if costs is None:
        measured = read_costs(Path(options.costs))
        return measured if options.host_ms is None else replace(measured, host_ms=options.host_ms)
    if options.vocoder == "tf32":
        costs = replace(costs, vocoder_ms=TF32_VOCODER_MS)
    return costs if options.host_ms is None else replace(costs, host_ms=options.host_ms)


def _described(options: ScheduleBench, costs: Costs) -> str:
    load = "with pictures, video, chats and openings" if options.mixed else "alone"
    return (
        f"{costs.device}: {options.sessions} conversations {load}, {options.speaking:.0%} speaking,"
        f" {options.lanes} lanes, {costs.host_ms:g} ms of the host for each launch"
    )


def _estimated(options: ScheduleBench, costs: Costs) -> str:
    """Return the prediction for the conversations alone, on two lanes."""
    estimate = predict(costs, options.sessions, options.speaking, MEAN_IDS)
    return (
        f"predicted for two lanes without other load: {estimate.p99_ms:.0f} ms p99 of speaking"
        f" units, {estimate.pass_ms:.1f} ms for each pass"
    )


def capacity_of(outcome: Outcome, sessions: int) -> float:
    """Return how many sessions a worker on a GPU takes that measures the latencies of a run."""
    capacity = SessionCapacity(GPU_LATENCY_LIMIT_S)
    for answer in sorted(outcome.answers, key=lambda answer: answer.at_s):
        if is_spoken(answer.task) and answer.at_s < math.inf:
            capacity.note(answer.latency_s, sessions, answer.at_s)
    return capacity.count


def _admitted(options: ScheduleBench, outcome: Outcome) -> str:
    return (
        f"a worker with these latencies and a limit of {1e3 * GPU_LATENCY_LIMIT_S:.0f} ms takes"
        f" {capacity_of(outcome, options.sessions):.0f} sessions\n"
    )


def _row(name: str, outcome: Outcome) -> tuple[str, ...]:
    def times(of: Callable[[Task], bool], *shares: float) -> list[str]:
        latencies = outcome.latencies(of)
        return [f"{1e3 * percentile(latencies, share):.0f}" for share in shares]

    return (
        name,
        str(len(outcome.latencies(is_ordinary))),
        *times(is_ordinary, 0.5, 0.95, 0.99, 1.0),
        *times(lambda task: not task.is_large and not task.speaks, 0.5, 0.99),
        *times(is_spoken, 0.5, 0.99),
        *times(lambda task: not task.is_large and task.begins_turn, 0.5, 0.99),
        str(len(outcome.latencies(lambda task: task.is_large))),
        *times(lambda task: task.is_large, 0.99),
        str(outcome.late),
        " ".join(f"{lane} {100 * share:.0f}" for lane, share in outcome.busy.items()),
    )
