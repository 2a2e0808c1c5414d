"""`duplane bench fabric` with resumable calls, whose connections or edges are lost."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson

from duplane.client import INPUT_RATE
from duplane.tools.bench.load.files import check_writable
from duplane.tools.bench.load.plan import UNIT_S
from duplane.tools.bench.load.row import Percentiles, ProcessCost, process_cost
from duplane.tools.bench.load.target import target
from duplane.tools.bench.load.watch import Watch
from duplane.tools.bench.options import FabricBench
from duplane.tools.bench.report import show
from duplane.tools.bench.returns.balancer import Balancer
from duplane.tools.bench.returns.calls import Caller, Seen
from duplane.tools.bench.returns.faults import Disturber
from duplane.tools.bench.returns.units import Faults

_LAST_S = 5.0  # at the end, in which nothing is disturbed


@dataclass(frozen=True)
class ReturnRow:
    """The figures of one run."""

    sessions: int
    seconds: float
    calls: int
    units: int
    disturbances: Mapping[str, int]
    faults: Faults
    failures: Mapping[str, int]  # why calls were lost
    returns: int
    left: int  # returns at the wish of an edge that shut down
    lost_samples: int  # of the input, because clients were away for too long
    took_ms: Percentiles  # from the attempt that succeeds to the server's answer
    answer_ms: Percentiles  # from a return to the next event of a unit
    gap_ms: Percentiles  # for which the server had no socket
    latency_ms: Percentiles  # from a unit to its answer, with the time without a connection
    drain_ms: Percentiles  # from SIGTERM to the end of an edge
    slots_left: int | None
    processes: Mapping[str, ProcessCost]

    @property
    def problems(self) -> Sequence[str]:
        """Why the row does not hold; empty if it does."""
        faults = self.faults
        found = [
            f"{count} {text}"
            for count, text in (
                (faults.calls_lost, "calls lost"),
                (faults.units_lost, "units lost"),
                (faults.units_doubled, "units doubled"),
                (faults.out_of_order, "units out of order"),
                (self.slots_left or 0, "slots not free at the end"),
            )
            if count
        ]
        return found if self.returns else [*found, "no client has returned"]


async def bench_returns(options: FabricBench) -> Sequence[ReturnRow]:
    """Measure, print, and write the JSON file if it is requested; return the rows."""
    if options.json:
        check_writable(options.json)
    rows: list[ReturnRow] = []
    try:
        for sessions in options.sessions:
            rows.append(await _row(options, sessions))
    finally:
        _show(rows)
        if options.json:
            found = [asdict(row) | {"problems": row.problems} for row in rows]
            document = {"version": 1, "options": _plain(options), "returns": found}
            options.json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    return rows


def _plain(options: FabricBench) -> Mapping[str, object]:
    values = asdict(options).items()
    return {name: str(one) if hasattr(one, "__fspath__") else one for name, one in values}


async def _row(options: FabricBench, sessions: int) -> ReturnRow:
    seen = Seen()
    async with target(options, sessions) as measured:
        edges = [edge.address for edge in measured.edges]
        watch = Watch(measured.process_ids)
        watch.look()
        async with Balancer.running(edges) as balancer, asyncio.TaskGroup() as tasks:
            begin_s = time.monotonic()
            end_s = begin_s + options.warm_up_s + options.seconds
            disturber = Disturber(options, balancer, measured.edges)
            watching = tasks.create_task(watch.run())
            async with asyncio.TaskGroup() as calling:
                for index in range(sessions):
                    caller = Caller(f"ws://{balancer.address}", options, seen)
                    first_s = begin_s + UNIT_S * index / sessions
                    calling.create_task(caller.run(first_s, end_s))
                await asyncio.sleep(options.warm_up_s)
                await disturber.run(sessions, end_s - _LAST_S)
            watching.cancel()
        slots_left = await measured.slots_left()
        costs = {
            one.name: process_cost(one.samples, begin_s, end_s, seen.units)
            for one in watch.watched
            if one.samples
        }
    done = disturber.done
    return ReturnRow(
        sessions=sessions,
        seconds=options.seconds,
        calls=seen.calls,
        units=seen.units,
        disturbances=dict(done.counts),
        faults=seen.faults,
        failures=dict(seen.failures),
        returns=len(seen.returns),
        left=sum(one.was_asked for one in seen.returns),
        lost_samples=sum(one.lost_samples for one in seen.returns),
        took_ms=_ms([one.took_s for one in seen.returns]),
        answer_ms=_ms(seen.answers_s),
        gap_ms=_ms([one.gap_s for one in seen.returns]),
        latency_ms=_ms(seen.latencies_s),
        drain_ms=_ms(done.drains_s),
        slots_left=slots_left,
        processes=costs,
    )


def _ms(seconds: Sequence[float]) -> Percentiles:
    return Percentiles.of([one * 1e3 for one in seconds])


def _show(rows: Sequence[ReturnRow]) -> None:
    if not rows:
        return
    show(
        "resumable calls in B: what was lost",
        (
            *("sessions", "calls", "units", "disturbed", "returns", "asked to leave"),
            *(
                "calls lost",
                "lost",
                "doubled",
                "out of order",
                "dropped",
                "too old (s)",
                "slots left",
                "",
            ),
        ),
        [_fault_cells(row) for row in rows],
    )
    times = [(row, name, one) for row in rows for name, one in _times(row).items()]
    show(
        "ms",
        ("", "p50", "p95", "p99", "max"),
        [
            (f"{row.sessions}: {name}", *map(_cell, (one.p50, one.p95, one.p99, one.max)))
            for row, name, one in times
        ],
    )
    show(
        "CPU time; MB before the first call, in the middle and at the end",
        ("", "cores", "before", "middle", "end", "peak"),
        [
            (
                f"{row.sessions}: {name}",
                f"{cost.cpu_cores:.2f}",
                *(
                    f"{size:.1f}"
                    for size in (
                        *(cost.rss_before_mb, cost.rss_middle_mb),
                        *(cost.rss_end_mb, cost.rss_peak_mb),
                    )
                ),
            )
            for row in rows
            for name, cost in row.processes.items()
        ],
    )
    for row in rows:
        for why, count in row.failures.items():
            sys.stdout.write(f"{row.sessions}: {count} calls lost: {why}\n")


def _fault_cells(row: ReturnRow) -> Sequence[str]:
    faults = row.faults
    disturbed = ", ".join(f"{count} {name}" for name, count in sorted(row.disturbances.items()))
    counts = (
        *(faults.calls_lost, faults.units_lost, faults.units_doubled),
        *(faults.out_of_order, faults.units_dropped),
        *(round(row.lost_samples / INPUT_RATE), row.slots_left),
    )
    return (
        *map(str, (row.sessions, row.calls, row.units)),
        disturbed,
        *map(str, (row.returns, row.left, *counts)),
        "; ".join(row.problems) or "holds",
    )


def _times(row: ReturnRow) -> Mapping[str, Percentiles]:
    found = {
        "return to answer of the edge": row.took_ms,
        "return to next event of a unit": row.answer_ms,
        "server without a socket": row.gap_ms,
        "unit to answer": row.latency_ms,
        "edge empty after SIGTERM": row.drain_ms,
    }
    return {name: one for name, one in found.items() if one.p50 is not None}


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
