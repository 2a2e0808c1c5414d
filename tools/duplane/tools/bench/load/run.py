"""`duplane bench fabric`: real processes under the load of real-time sessions."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import orjson

from duplane.tools.bench.load.capacity import search
from duplane.tools.bench.load.files import check_writable, document
from duplane.tools.bench.load.generators import Generators
from duplane.tools.bench.load.operator_pages import OperatorPages
from duplane.tools.bench.load.plan import UNIT_S, Plan, share
from duplane.tools.bench.load.reports import LoadFigures
from duplane.tools.bench.load.row import (
    Limits,
    Percentiles,
    Row,
    Stop,
    generator_cost,
    moves_of,
    problems,
    process_cost,
)
from duplane.tools.bench.load.stops import Stopper
from duplane.tools.bench.load.tables import (
    capacity_text,
    progress_text,
    show_rows,
)
from duplane.tools.bench.load.target import Target, target
from duplane.tools.bench.load.watch import Watch
from duplane.tools.bench.options import FabricBench

_PROGRESS_S = 5.0
_GENERATORS = "generators"  # name of the generators in the list of watched processes


class _Run:
    """One run: a number of sessions in one dialect."""

    def __init__(self, options: FabricBench, dialect: str, sessions: int) -> None:
        self._options = options
        self._dialect = dialect
        self._sessions = sessions
        self._warm_up_units = round(options.warm_up_s / UNIT_S)
        self._units = max(1, round(options.seconds / UNIT_S))
        self._shown_s = 0.0  # when progress was last shown

    async def row(self) -> Row:
        """Measure a fabric that this method starts and stops, or the server of `--url`."""
        async with target(self._options, self._sessions) as measured:
            row = await self._measure(measured)
        if measured.receiver is None:
            return row
        return replace(row, exported_bytes=measured.receiver.byte_count)  # with final exports

    async def _measure(self, measured: Target) -> Row:
        plans = [
            Plan(
                url=measured.url(self._dialect),
                dialect=self._dialect,
                open_timeout_s=self._options.open_timeout_s,
                ca=str(self._options.ca) if self._options.ca else None,
                is_resumable=self._options.resumable,
                sessions=list(indices),
                session_count=self._sessions,
                phases=self._options.phases,
                warm_up_units=self._warm_up_units,
                units=self._units,
                session_units=max(1, round(self._options.session_s / UNIT_S)),
            )
            for indices in share(self._sessions, self._options.generators)
        ]
        page_count = self._options.operator_pages
        async with (
            Generators(plans) as generators,
            OperatorPages.reading(measured.edge_url, page_count) as pages,
        ):
            watch = Watch({**measured.process_ids, _GENERATORS: lambda: generators.process_ids})
            watch.look()
            await generators.opened()
            start_s = generators.start() + self._warm_up_units * UNIT_S
            watching = asyncio.create_task(watch.run())
            every_s, number = self._options.stop_plan
            stopper = Stopper(
                measured.workers, measured.scheduler, every_s, number, measured.credentials
            )
            stopping = asyncio.create_task(stopper.run(start_s, self._units * UNIT_S))
            self._shown_s = start_s
            try:
                seen = await generators.run(self._show_progress)
                watch.look()  # while the generators still run
                await stopping
            finally:
                watching.cancel()
                stopping.cancel()
            ended_count = pages.ended_count
        slots_left = await measured.slots_left()
        row = self._judge(seen, watch, start_s, slots_left, stopper.stops)
        if not page_count:
            return row
        found = [f"{ended_count} streams for operators ended"] if ended_count else []
        return replace(row, page_bytes=pages.byte_count, problems=[*row.problems, *found])

    def _judge(
        self,
        seen: LoadFigures,
        watch: Watch,
        begin_s: float,
        slots_left: int | None,
        stops: Sequence[Stop] = (),
    ) -> Row:
        options = self._options
        limits = Limits(options.limit_ms, options.max_lateness_ms)
        end_s = begin_s + self._units * UNIT_S
        costs = {
            one.name: process_cost(one.samples, begin_s, end_s, seen.counts.answered)
            for one in watch.watched
            if one.samples  # none if a process ended before the first look
        }
        generator = generator_cost(seen, costs.pop(_GENERATORS), limits)
        added = Percentiles.of([one.added_ms for one in seen.timed])
        is_killed = options.kill_every_s > 0
        moves = moves_of(stops, seen.timed, is_killed=is_killed) if stops else None
        found = [*problems(seen.counts, added, generator, limits, moves)]
        ended = {one.name for one in watch.watched if one.has_ended}
        found += [f"{name} ended" for name in ended if not (moves and name == "worker")]
        if slots_left:
            found.append(f"{slots_left} slots not free at the end")
        return Row(
            dialect=self._dialect,
            sessions=self._sessions,
            phases=options.phases,
            seconds=self._units * UNIT_S,
            latency_ms=Percentiles.of([one.latency_ms for one in seen.timed]),
            added_ms=added,
            is_worker_time_known=all(one.worker_ms is not None for one in seen.timed),
            counts=seen.counts,
            failures=seen.failures,
            slots_left=slots_left,
            processes=costs,
            generator=generator,
            problems=found,
            moves=moves,
        )

    def _show_progress(self, seen: LoadFigures) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _PROGRESS_S:
            self._shown_s = now_s
            recent = seen.take_recent()
            _tell(progress_text(self._dialect, self._sessions, seen.counts, recent))


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


async def _capacity(options: FabricBench, dialect: str, rows: list[Row]) -> int:
    """Search for the largest number of sessions that the fabric holds (see `Row.holds`).

    If the fabric does not hold a number of sessions, this number is tried a second time.
    """
    searching = search(options.sessions[0], options.max_sessions)
    try:
        sessions = next(searching)
        while True:
            for _ in range(2):
                rows.append(await _Run(options, dialect, sessions).row())
                _tell(f"{sessions} sessions: {'; '.join(rows[-1].problems) or 'holds'}")
                if rows[-1].holds:
                    break
            sessions = searching.send(rows[-1].holds)
    except StopIteration as found:
        return found.value


async def bench_fabric(options: FabricBench) -> Sequence[Row]:
    """Measure, print, and write the JSON file if it is requested; return the rows.

    If the run is cancelled, the rows that are complete are printed and written.
    """
    if options.json:
        check_writable(options.json)
    rows: list[Row] = []
    capacities: dict[str, int] = {}
    try:
        for dialect in options.protocols:
            if options.find_capacity:
                capacities[dialect] = await _capacity(options, dialect, rows)
            else:
                for sessions in options.sessions:
                    rows.append(await _Run(options, dialect, sessions).row())
    finally:
        show_rows(rows)
        for dialect, sessions in capacities.items():
            sys.stdout.write(capacity_text(dialect, sessions, rows, options))
        if options.json:
            found = document(options, rows, capacities)
            options.json.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return rows
