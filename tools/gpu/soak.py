"""Runs a whole fabric for some minutes, with a conversation in every slot."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson

from duplane.client import DuplexError, DuplexSession, EncodedSound, encode
from duplane.fabric.monitoring.logs import configure_logging
from duplane.tools.bench.report import percentile
from duplane.tools.up.fabric import UpSettings, running
from measure import Options, Report, checkpoint_directory, read_options

PERIODS = 10
"""Number of rows of the table."""
RETRY_S = 1.0
"""Pause between the end of a session and the start of the next."""


@dataclass
class Figures:
    """The measurements of one period."""

    listening: list[float] = field(default_factory=list[float])
    speaking: list[float] = field(default_factory=list[float])
    dropped: int = 0
    ended: int = 0


def noise() -> EncodedSound:
    """Return a second of noise."""
    samples = np.random.default_rng(0).normal(0, 0.05, 16_000).astype(np.float32)
    return encode(samples.data, uplink="float32")


@dataclass
class Soak:
    """The data that sessions share: the edge's address, the time of the end, and the figures."""

    edge: str
    end: float
    figures: Figures = field(default_factory=Figures)
    unit: EncodedSound = field(default_factory=noise)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a fabric and run it; return the exit code."""
    options = read_options(arguments)
    report = Report("soak", options)
    configure_logging("soak", "WARNING")
    with report.case("soak"), checkpoint_directory(options) as directory:
        settings = UpSettings(
            port=0,
            slot_count=2 if options.small else 64,
            checkpoint=directory,
            devices=(options.device_name,),
            dtype="bfloat16" if options.dtype == "bfloat16" else "float32",
            log_level="WARNING",
        )
        asyncio.run(soak(options, report, settings))
    return report.exit_code


async def soak(options: Options, report: Report, settings: UpSettings) -> None:
    """Run sessions, half of which may speak, and add a row for every period."""
    async with running(settings) as fabric:
        count = fabric.slot_count
        if count is None:
            raise ValueError("slots is auto, must be a number")
        table = report.table(
            f"{count} sessions of one unit per second; ms from unit to answer",
            (
                *("until, s", "units", "listen p50", "listen p99", "speak p50", "speak p99"),
                *("longest", "dropped", "ended"),
            ),
        )
        begin = time.monotonic()
        shared = Soak(fabric.edge, begin + 60 * options.minutes)
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(keep_talking(shared, number, count))
            for period in range(1, PERIODS + 1):
                until = begin + 60 * options.minutes * period / PERIODS
                await asyncio.sleep(max(0.0, until - time.monotonic()))
                figures, shared.figures = shared.figures, Figures()
                table.add(f"{until - begin:.0f}", *cells(figures))


def cells(figures: Figures) -> tuple[float | int | str, ...]:
    """Return the cells of one row; times are in milliseconds."""
    both = figures.listening + figures.speaking
    shares = [
        1e3 * percentile(values, share) if values else ""
        for values in (figures.listening, figures.speaking)
        for share in (0.5, 0.99)
    ]
    return (len(both), *shares, 1e3 * max(both, default=0.0), figures.dropped, figures.ended)


async def keep_talking(shared: Soak, number: int, count: int) -> None:
    """Run one session after another. Each sends its units at its own fraction of the second."""
    await asyncio.sleep(number / count)
    while time.monotonic() < shared.end:
        session = DuplexSession(f"ws://{shared.edge}", proxy=False, loads=orjson.loads, attempts=1)
        with contextlib.suppress(DuplexError):
            async with session:
                await converse(shared, session, is_listening=number % 2 == 0)
        if time.monotonic() < shared.end:
            shared.figures.ended += 1
            await asyncio.sleep(RETRY_S)


async def converse(shared: Soak, session: DuplexSession, *, is_listening: bool) -> None:
    """Send a unit every second and time the answers, until the end or until the server closes."""
    sent: deque[float] = deque()
    reading = asyncio.create_task(read(shared, session, sent))
    try:
        due = time.monotonic()
        while due < shared.end and not reading.done():
            if is_listening:
                session.interrupt()  # the model listens to each unit
            await session.send(shared.unit)
            sent.append(time.monotonic())
            due += 1.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def read(shared: Soak, session: DuplexSession, sent: deque[float]) -> None:
    """Record the time to the first event of each answered unit, and count dropped units."""
    newest = -1
    async for output in session:
        if output.index == newest:
            continue
        newest = output.index
        shared.figures.dropped += output.dropped_units
        times = [sent.popleft() for _ in range(min(output.dropped_units + 1, len(sent)))]
        if times:
            found = shared.figures.speaking if output.speaks else shared.figures.listening
            found.append(output.received_s - times[-1])


if __name__ == "__main__":
    sys.exit(main())
