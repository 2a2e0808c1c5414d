"""The client for Python understands what the transcripts of A and B say."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from support.protocols.client_replay import (
    TRANSCRIPTS,
    Outcome,
    expected,
    is_told_to_clients,
    replay_server,
)
from support.time_limits import WITHIN_S

from duplane.client import DuplexError, DuplexSession, InputError, Output, QueuePlace
from duplane.client.events import Dialect, Event

NAMES = [name for name, transcript in TRANSCRIPTS.items() if is_told_to_clients(transcript)]


class Client:
    """Does what the replay demands, and notes what it sees."""

    def __init__(self, url: str, name: str) -> None:
        self.seen = Outcome()
        self._tasks: set[asyncio.Task[object]] = set()
        dialect: Dialect = "A" if name.startswith("a_") else "B"
        self._session = DuplexSession(
            f"{url}?transcript={name}",
            dialect=dialect,
            attempts=1,
            on_queue=self._queued,
            on_error=self._refused,
            on_event=self._demanded,
        )

    def _queued(self, place: QueuePlace) -> None:
        self.seen.positions.append(place.position)

    def _refused(self, error: InputError) -> None:
        self.seen.faults.append(error.code)

    def _demanded(self, event: Event) -> None:
        if event["type"] == "replay.append":
            self._tasks.add(asyncio.ensure_future(self._session.send(bytes(32_000))))
        if event["type"] == "replay.close":
            self._tasks.add(asyncio.ensure_future(self._session.close()))

    async def run(self) -> Outcome:
        indices: set[int] = set()
        try:
            await self._session.connect()
            async for output in self._session:
                indices.add(output.index)
                self._add(output)
        except DuplexError as error:
            self.seen.error, self.seen.code = type(error).__name__, error.code
        await asyncio.gather(*self._tasks)
        self.seen.unit_count = len(indices)
        self.seen.end = self._session.end.reason if self._session.end else None
        return self.seen

    def _add(self, output: Output) -> None:
        self.seen.text += output.text
        self.seen.sample_count += len(output.audio)
        self.seen.turn_count += output.end_of_turn
        self.seen.interrupted_count += output.interrupted


@pytest.mark.parametrize("name", NAMES)
async def test_client_understands_the_transcript(name: str) -> None:
    async with asyncio.timeout(WITHIN_S), replay_server() as url:
        assert await Client(url, name).run() == expected(TRANSCRIPTS[name])


def test_transcripts_show_most_of_the_protocols() -> None:
    assert len(NAMES) > 60
    outcomes = [expected(TRANSCRIPTS[name]) for name in NAMES]
    assert {each.error for each in outcomes} == {None, "BusyError", "RefusedError", "ServerError"}
    assert any(each.positions for each in outcomes)
    assert any(each.interrupted_count for each in outcomes)


async def test_client_that_leaves_the_loop_closes_in_order() -> None:
    name = "b_listens_and_speaks"
    async with asyncio.timeout(WITHIN_S), replay_server() as url:
        session = DuplexSession(f"{url}?transcript={name}")
        with contextlib.suppress(StopAsyncIteration):
            await session.connect()
        await session.close()
    assert session.end
