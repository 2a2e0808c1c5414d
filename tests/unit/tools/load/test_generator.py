"""A load generator keeps its pace, and counts what a server does to its sessions.

The tests run on virtual time, so the times are exact and do not depend on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import orjson
import pytest
from simulation.virtual_time import run

from duplane.tools.bench.load import generator
from duplane.tools.bench.load.generator import Load, Ticks
from duplane.tools.bench.load.ledger import Answer, Counts, Timed
from duplane.tools.bench.load.plan import UNIT_S, Plan
from duplane.tools.bench.load.sessions import LoadSession, SessionError

START_S = 10.0


class LoopTime:
    """Replaces the module `time` by the time of the event loop."""

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "time", LoopTime)


class Server:
    """Sessions that answer each unit immediately."""

    def __init__(self) -> None:
        # For each session: its units and the times of their arrival.
        self.sent: list[list[tuple[int, float]]] = []
        self.blocked_s: dict[int, float] = {}  # seconds for which the server does not read a unit
        self.refuses = False
        self.closes = True
        self.opening_s: dict[int, float] = {}  # seconds that a session takes to open, by its number

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncGenerator[LoadSession]:
        if self.refuses:
            raise SessionError("refused")
        await asyncio.sleep(self.opening_s.get(len(self.sent), 0.0))
        yield Session(self)
        if not self.closes:
            await asyncio.Event().wait()


class Session:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        self._sent: list[tuple[int, float]] = []
        server.sent.append(self._sent)

    async def send(self, number: int) -> None:
        self._sent.append((number, LoopTime.monotonic()))
        await asyncio.sleep(self._server.blocked_s.get(number, 0.0))
        self._answers.put_nowait(Answer(unit=number, worker_ms=0.0))

    async def answers(self) -> AsyncIterator[tuple[float, Answer]]:
        while answer := await self._answers.get():
            yield LoopTime.monotonic(), answer

    async def close(self) -> None:
        self._answers.put_nowait(None)


def measure(server: Server, session_units: int = 100, warm_up_units: int = 1) -> Load:
    """Run one session that sends its warm-up and five more units."""
    load = Load(
        Plan(
            url="",
            dialect="B",
            open_timeout_s=1.0,
            ca=None,
            is_resumable=False,
            sessions=[0],
            session_count=1,
            phases="spread",
            warm_up_units=warm_up_units,
            units=5,
            session_units=session_units,
        ),
        server.session,
    )

    async def open_and_run() -> None:
        await load.open()
        await load.run(START_S)

    run(open_and_run())
    return load


def test_units_are_sent_at_their_times_and_answered(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    load = measure(server)
    assert load.report.counts == Counts(sent=5, answered=5)
    ((numbers, times),) = [zip(*sent, strict=True) for sent in server.sent]
    assert numbers == tuple(range(6))
    assert times == pytest.approx([START_S + number * UNIT_S for number in range(6)])
    assert '"done":true' in capsys.readouterr().out.splitlines()[-1]


def test_delays_of_the_warm_up_are_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    measure(Server(), warm_up_units=2)
    reports = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = [len(report["loop_ms"]) for report in reports]  # one report a second
    begin = round(START_S + 2 * UNIT_S)
    assert not any(counts[:begin])
    assert min(counts[begin + 1 : -1]) > 90


def test_renewed_session_counts_its_units_from_0() -> None:
    server = Server()
    load = measure(server, session_units=4)
    first, second = ([number for number, _ in sent] for sent in server.sent)
    assert first == [0, 1, 2, 3]
    assert second[0] == 0
    assert load.report.counts.broken_sessions == 0


def test_units_whose_seconds_pass_while_a_session_opens_are_unsent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Server()
    server.opening_s = {1: 3.5 * UNIT_S}  # the opening takes from unit 2 to the middle of unit 5
    load = measure(server, session_units=3)
    assert load.report.counts == Counts(sent=3, answered=3, unsent=2)
    assert [[number for number, _ in sent] for sent in server.sent] == [[0, 1, 2], [0]]
    reports = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    late_ms = [late for report in reports for late in report["lateness_ms"]]
    assert late_ms == pytest.approx([0.0] * 3, abs=1e-6)


def test_time_in_which_the_server_does_not_read_is_latency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []

    def keep(load: Load, timed: list[Timed]) -> None:
        seen.extend(one.latency_ms for one in timed)
        timed.clear()

    monkeypatch.setattr(Load, "keep", keep)
    server = Server()
    server.blocked_s = {2: 3.5 * UNIT_S}  # the next three units wait behind it
    load = measure(server)
    assert load.report.counts == Counts(sent=5, answered=5, late=3)
    assert seen == pytest.approx([0.0, 3500.0, 2500.0, 1500.0, 500.0])


def test_server_that_never_reads_breaks_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "SEND_TIMEOUT_S", 0.02)
    server = Server()
    server.blocked_s = {3: 3600.0}
    load = measure(server)
    assert load.report.counts.broken_sessions == 1
    assert load.report.counts.unanswered == 1
    assert load.report.failures == {"the server did not read for 0.02 s": 1}
    assert len(server.sent) == 2


def test_session_that_does_not_close_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "CLOSE_TIMEOUT_S", 0.02)
    server = Server()
    server.closes = False
    load = measure(server, session_units=4)
    assert load.report.counts == Counts(sent=5, answered=5)
    assert load.report.failures == {"the session did not close in 0.02 s": 2}


def test_unit_is_not_sent_while_no_session_opens() -> None:
    server = Server()
    server.refuses = True
    load = measure(server)
    assert load.opening().count == 0
    assert load.report.counts.unsent == 5
    assert load.report.counts.broken_sessions >= 6
    assert load.report.failures["refused"] == load.report.counts.broken_sessions


def test_only_the_part_of_a_pause_within_the_time_of_a_unit_counts() -> None:
    ticks = Ticks()
    # The loop was blocked from 1.5 s to 2 s and from 3 s to 4 s.
    ticks._stalls.extend([(2.0, 0.5), (4.0, 1.0)])
    assert ticks.stalled_s(0.0, 1.0) == 0.0
    assert ticks.stalled_s(1.75, 3.25) == pytest.approx(0.5)
    assert ticks.stalled_s(0.0, 9.0) == pytest.approx(1.5)
