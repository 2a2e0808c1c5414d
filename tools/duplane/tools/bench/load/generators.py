"""Starts the processes that generate load, and collects their reports."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import orjson

from duplane.tools.bench.load.ledger import Counts, Timed
from duplane.tools.bench.load.plan import Plan
from duplane.tools.bench.load.reports import LoadFigures, Opening, Report
from duplane.tools.command import CommandError

_LINE_BYTES = 1 << 26
_START_AFTER_S = 0.3  # from the start command to the first unit
_END_TIMEOUT_S = 5.0


class Generators:
    """Processes that generate load. Use as an async context manager."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = plans
        self._processes: list[asyncio.subprocess.Process] = []

    @property
    def process_ids(self) -> Sequence[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    async def __aenter__(self) -> Self:
        for plan in self._plans:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "duplane.tools.bench.load.generator"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
                # Ctrl-C reaches only the command, which then ends the generators.
                start_new_session=True,
            )
            self._processes.append(process)
            _write(process, plan)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin, "it was started with a pipe"
            process.stdin.close()
            try:
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def opened(self) -> None:
        """Wait until every session is open or has failed to open.

        Raises CommandError if none is open.
        """
        openings = [Opening(**await _read(process)) for process in self._processes]
        if not any(opening.count for opening in openings):
            reasons = {reason: True for opening in openings for reason in opening.failures}
            raise CommandError(f"no session could be opened: {'; '.join(reasons)}")

    def start(self) -> float:
        """Start all generators together; return the monotonic time of the first unit."""
        start_s = time.monotonic() + _START_AFTER_S
        for process in self._processes:
            _write(process, {"start_s": start_s})
        return start_s

    async def run(self, on_report: Callable[[LoadFigures], None]) -> LoadFigures:
        """Collect the reports until all generators are done."""
        seen = LoadFigures()

        async def collect(at: int, process: asyncio.subprocess.Process) -> None:
            is_done = False
            while not is_done:
                report = _report(await _read(process))
                seen.add(at, report)
                on_report(seen)
                is_done = report.done

        async with asyncio.TaskGroup() as tasks:
            for at, process in enumerate(self._processes):
                tasks.create_task(collect(at, process))
        return seen


def _write(process: asyncio.subprocess.Process, value: object) -> None:
    assert process.stdin, "it was started with a pipe"
    process.stdin.write(orjson.dumps(value) + b"\n")


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout, "it was started with a pipe"
    line = await process.stdout.readline()
    if not line:
        raise CommandError(f"a generator ended with exit code {await process.wait()}")
    return orjson.loads(line)


def _report(line: dict[str, Any]) -> Report:
    timed = [Timed(**one) for one in line.pop("timed")]
    return Report(timed=timed, counts=Counts(**line.pop("counts")), **line)
