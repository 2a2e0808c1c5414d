"""A model of 80 ms units with rates of its own in a whole fabric: real processes, every dialect.

The client sends sound in pieces of 400 ms. The edge resamples it and cuts five units of each piece,
and resamples the speech for the client. Each answer has a checksum of all that the model has heard,
so equal texts mean that nothing was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import psutil
import pybase64
import pytest
from support.fabric.real_fabric import RealFabric
from support.fabric.talker import until_free
from support.paths import ROOT
from support.time_limits import WITHIN_S, until

from duplane.fabric.audio import Samples
from duplane.tools.talk.dialects import UnitReply
from duplane.tools.talk.sessions import TalkSession, Wish, begun

pytestmark = pytest.mark.timing

DIALECTS = ("A", "B", "C", "L")
PIECES, PIECE_S = 12, 0.4
UNITS_OF_PIECE = 5
KILLED_AT = 6
CLIENT_INPUT_HERTZ, CLIENT_OUTPUT_HERTZ = 16_000, 24_000


@pytest.fixture(scope="module")
async def fabric(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[RealFabric]:
    """A fabric of two workers that run the echo of the tests."""
    checkpoint = tmp_path_factory.mktemp("echo")
    environment = {
        "DUPLANE_FAMILY": "support.echo_family",
        "DUPLANE_WORKERS": "2",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    async with RealFabric.starting(str(checkpoint), **environment) as fabric:
        yield fabric


def piece(number: int) -> Samples:
    """Return 400 ms of a tone."""
    first = number * round(PIECE_S * CLIENT_INPUT_HERTZ)
    times_s = (first + np.arange(round(PIECE_S * CLIENT_INPUT_HERTZ))) / CLIENT_INPUT_HERTZ
    return (0.4 * np.sin(2 * np.pi * 440 * times_s)).astype(np.float32)


async def worker_of_session(fabric: RealFabric) -> psutil.Process:
    """Return the process of the only worker that has a session."""
    found: list[int] = []

    async def is_listed() -> bool:
        rows = (await fabric.get("/workers"))[1]["workers"]
        found[:] = [int(row["worker_id"].split("-")[-2]) for row in rows if row["sessions"]]
        return len(found) == 1

    await until(is_listed, WITHIN_S)
    return psutil.Process(found[0])


class Caller:
    """A client of one dialect. `words` are the checksums that it has heard."""

    def __init__(self, session: TalkSession) -> None:
        self.words: list[str] = []
        self.sample_count = 0
        self._session = session
        self._replies = session.replies()

    async def exchange(self, number: int) -> None:
        """Send a piece, and receive the answers to its units."""
        await self._session.send(number, piece(number))
        while len(self.words) < UNITS_OF_PIECE * (number + 1):
            async with asyncio.timeout(WITHIN_S):
                self._hear(await anext(self._replies))

    async def end(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            await self._session.close()
            async for reply in self._replies:
                self._hear(reply)
        assert self._session.end is not None

    def _hear(self, reply: UnitReply) -> None:
        self.words += reply.text.split()
        self.sample_count += len(pybase64.b64decode(reply.audio)) // 4


async def call(fabric: RealFabric, dialect: str, *, is_disturbed: bool = False) -> Caller:
    """Run a session. If it is disturbed, kill its worker in the middle."""
    await until_free(fabric, 4)
    wish = Wish(url=f"ws://{fabric.edge}", dialect=dialect, prompt="An echo.")
    async with begun(wish) as session:
        caller = Caller(session)
        for number in range(PIECES):
            if is_disturbed and number == KILLED_AT:
                (await worker_of_session(fabric)).kill()
            await caller.exchange(number)
        await caller.end()
    return caller


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_client_hears_the_echo_of_every_unit(fabric: RealFabric, dialect: str) -> None:
    caller = await call(fabric, dialect)
    assert len(set(caller.words)) == PIECES * UNITS_OF_PIECE
    seconds = caller.sample_count / CLIENT_OUTPUT_HERTZ
    assert seconds == pytest.approx(PIECES * PIECE_S, abs=0.1)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_client_of_a_killed_worker_hears_the_same(fabric: RealFabric, dialect: str) -> None:
    undisturbed = await call(fabric, dialect)
    caller = await call(fabric, dialect, is_disturbed=True)
    assert caller.words == undisturbed.words
    assert caller.sample_count == undisturbed.sample_count


def test_the_family_is_not_part_of_duplane() -> None:
    sources = [path for folder in ("worker", "edge") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in sources if "echo_family" in Path(path).read_text()]
