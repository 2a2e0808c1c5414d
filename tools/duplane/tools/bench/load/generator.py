"""One process that generates load: it runs its sessions at real-time pace.

The process reads a plan as one line of JSON, opens the sessions and writes an `Opening`. Then it
reads `{"start_s": T}`, a monotonic time, and writes one `Report` per second; the last report is
`done`. The process ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable

import orjson
import uvloop

from duplane.fabric.client import FabricClient
from duplane.fabric.monitoring.logs import configure_logging
from duplane.tools.bench.load.ledger import Ledger, Timed
from duplane.tools.bench.load.plan import UNIT_S, Plan
from duplane.tools.bench.load.reports import Opening, Report
from duplane.tools.bench.load.sessions import (
    GrpcSession,
    LibrarySession,
    LoadSession,
    Opened,
    SessionError,
    WebSocketSession,
)

_TICK_S = 0.01  # interval at which the delay of the event loop is measured
_STALL_S = 0.05  # a longer delay is stored, because it can make a unit late
_STALLS = 1000  # number of delays that are stored; older ones are deleted
_OPENING_COUNT = 16  # sessions that open at the same time
_ANSWER_TIMEOUT_S = 5.0  # for the last answers at the end of a session
CLOSE_TIMEOUT_S = 5.0  # for the connection to close after the end of a session
SEND_TIMEOUT_S = 10.0  # for the server to read a unit
_FAILURE_COUNT = 5  # largest number of different failures in a report


class Ticks:
    """The delays of the event loop."""

    def __init__(self) -> None:
        self.delays_ms: list[float] = []
        self._stalls: deque[tuple[float, float]] = deque(maxlen=_STALLS)  # end, seconds

    async def run(self, begin_s: float) -> None:
        """Measure delays until cancelled. `delays_ms` gets only the delays after `begin_s`."""
        while True:
            due_s = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            delay_s = max(0.0, now_s - due_s)
            if due_s >= begin_s:
                self.delays_ms.append(delay_s * 1e3)
            if delay_s > _STALL_S:
                self._stalls.append((now_s, delay_s))

    def stalled_s(self, begin_s: float, end_s: float) -> float:
        """Return how long the event loop was blocked between two times."""
        return sum(
            max(0.0, min(end_s, at_s) - max(begin_s, at_s - delay_s))
            for at_s, delay_s in self._stalls
        )


class PlannedSession:
    """One session of the plan, and the sessions that replace it."""

    def __init__(
        self, index: int, plan: Plan, open_session: Callable[[], Opened], load: Load
    ) -> None:
        self._index = index
        self._plan = plan
        self._open_session = open_session
        self._load = load
        self._stack = contextlib.AsyncExitStack()
        self._session: LoadSession | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ledger = Ledger(load.report.counts, load.ticks.stalled_s, index)
        self._number = 0  # number of the session's next unit
        self._news = asyncio.Event()  # an answer, or the end of the session

    async def open(self) -> None:
        """Open a session, or count the failure."""
        try:
            self._session = await self._stack.enter_async_context(self._open_session())
        except SessionError as error:
            self._load.broke(str(error))
            return
        self._ledger = Ledger(self._load.report.counts, self._load.ticks.stalled_s, self._index)
        self._load.ledgers[self._index] = self._ledger
        self._number = 0
        self._reading = asyncio.create_task(self._read(self._session, self._ledger))

    async def _read(self, session: LoadSession, ledger: Ledger) -> None:
        try:
            async for arrived_s, answer in session.answers():
                if answer.failure:
                    self._load.failed(answer.failure)
                ledger.answered(answer, arrived_s)
                self._news.set()
        except SessionError as error:
            self._load.broke(str(error))
            self._session = None
            self._news.set()

    async def close(self) -> None:
        """Close the session after its last answers have arrived."""
        if self._reading and self._session:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    while self._ledger.has_waiting and self._session:
                        self._news.clear()
                        await self._news.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    if self._session:
                        await self._session.close()
                    await asyncio.shield(self._reading)
        if self._reading:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        self._ledger.end()
        self._load.keep(self._ledger.timed)
        self._session = self._reading = None
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._stack.aclose()
        except TimeoutError:
            self._load.failed(f"the session did not close in {CLOSE_TIMEOUT_S:g} s")

    async def run(self, start_s: float) -> None:
        """Send a unit every second, beginning at `start_s`."""
        begin_s = start_s + self._plan.phase_s(self._index)
        free_s = 0.0  # when the last send had finished
        opened_s = 0.0  # when the last session had opened, or had failed to open
        for number in range(self._plan.warm_up_units + self._plan.units):
            due_s = begin_s + number * UNIT_S
            end_s = due_s + UNIT_S
            is_wanted = self._session is None or self._plan.is_renewed(self._index, number)
            if is_wanted and opened_s < end_s:
                await self.close()
                await self.open()
                opened_s = time.monotonic()
            due_s = max(due_s, opened_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            is_measured = self._plan.is_measured(number)
            if self._session is None or opened_s >= end_s:
                self._load.report.counts.unsent += is_measured
                continue
            # The generator is not late if it had to wait until the server read the last unit.
            late_s = time.monotonic() - max(due_s, free_s)
            self._ledger.sent(self._number, due_s + late_s, is_measured=is_measured)
            if is_measured:
                self._load.report.lateness_ms.append(max(0.0, late_s * 1e3))
            await self._send(self._session)
            free_s = time.monotonic()
        await self.close()

    async def _send(self, session: LoadSession) -> None:
        """Send the next unit.

        If the server does not read it in time, the session counts as broken.
        """
        number, self._number = self._number, self._number + 1
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                with contextlib.suppress(SessionError):  # the task that reads has the reason
                    await session.send(number)
        except TimeoutError:
            self._load.broke(f"the server did not read for {SEND_TIMEOUT_S:g} s")
            self._session = None


class Load:
    """The sessions of this process, and their figures."""

    def __init__(self, plan: Plan, open_session: Callable[[], Opened]) -> None:
        self.report = Report()
        self.ticks = Ticks()
        self.ledgers: dict[int, Ledger] = {}  # ledgers of the open sessions
        self._plan = plan
        self._failures = Counter[str]()
        self._lines = [PlannedSession(index, plan, open_session, self) for index in plan.sessions]

    async def open(self) -> None:
        """Open all sessions, `_OPENING_COUNT` at a time."""
        free = asyncio.Semaphore(_OPENING_COUNT)

        async def open_one(line: PlannedSession) -> None:
            async with free:
                await line.open()

        await asyncio.gather(*(open_one(line) for line in self._lines))

    def opening(self) -> Opening:
        """Return how many sessions are open."""
        return Opening(len(self.ledgers), dict(self._failures))

    async def run(self, start_s: float) -> None:
        """Send until all units of the plan are sent and answered."""
        begin_s = start_s + self._plan.warm_up_units * UNIT_S  # of the measurement
        ticking = asyncio.create_task(self.ticks.run(begin_s))
        writing = asyncio.create_task(self._write_reports())
        async with asyncio.TaskGroup() as tasks:
            for line in self._lines:
                tasks.create_task(line.run(start_s))
        ticking.cancel()
        writing.cancel()
        self.report.done = True
        self._write()

    def broke(self, reason: str) -> None:
        """Count a session that ended by itself."""
        self.report.counts.broken_sessions += 1
        self.failed(reason)

    def failed(self, reason: str) -> None:
        """Count the reason of a failure."""
        if reason in self._failures or len(self._failures) < _FAILURE_COUNT:
            self._failures[reason] += 1

    def keep(self, timed: list[Timed]) -> None:
        """Move the times of answered units to the report."""
        self.report.timed += timed
        timed.clear()

    async def _write_reports(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._write()

    def _write(self) -> None:
        for ledger in self.ledgers.values():
            self.keep(ledger.timed)
        self.report.loop_ms = self.ticks.delays_ms
        self.report.failures = dict(self._failures)
        _write_line(self.report)
        self.ticks.delays_ms = []
        self.report.timed, self.report.lateness_ms = [], []


def _write_line(value: object) -> None:
    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def _opener(plan: Plan) -> AsyncGenerator[Callable[[], Opened]]:
    if plan.dialect != "grpc":
        kind = LibrarySession if plan.dialect in ("A", "B") else WebSocketSession
        yield lambda: kind.opened(plan)
        return
    async with FabricClient([plan.url]) as client:
        yield lambda: GrpcSession.opened(client, plan.open_timeout_s)


async def _serve() -> None:
    commands = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    plan = Plan(**orjson.loads(await commands.readline()))
    async with _opener(plan) as open_session:
        load = Load(plan, open_session)
        await load.open()
        gc.freeze()
        _write_line(load.opening())
        if start := await commands.readline():
            running = asyncio.create_task(load.run(orjson.loads(start)["start_s"]))
            parent = asyncio.create_task(commands.read())
            await asyncio.wait({running, parent}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                os._exit(1)  # the parent has ended, so nobody needs the results
            await running
            await parent  # it measures this process until all generators are done


def run_generator() -> None:
    """Run until the plan is done."""
    configure_logging("bench", "ERROR")
    uvloop.run(_serve())


if __name__ == "__main__":
    run_generator()
