"""Resumable calls of one client process, which count every unit and every return."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from duplane.client import INPUT_RATE, DuplexError, DuplexSession, Return
from duplane.client.resuming import return_wait_s
from duplane.tools.bench.load.plan import UNIT_S
from duplane.tools.bench.load.sessions import ENCODED_SOUND
from duplane.tools.bench.options import FabricBench
from duplane.tools.bench.returns.units import Faults, Units
from duplane.worker.models.scripted.model import PROMPT_TOKENS, UNIT_TOKENS

_ANSWER_S = 60.0  # for the last answers of a call, after the last return
_LONG_S = 8.0  # after which all units that the server has are answered
_CLOSED = ("user_stop", "closed")  # the latter if the connection was lost during the close
_FIRST = asyncio.FIRST_COMPLETED
_SHORTEST = 5  # units of the shortest call
_FAILURE_COUNT = 20  # largest number of different failures that are kept


@dataclass
class Seen:
    """What the clients of all calls have seen."""

    calls: int = 0
    units: int = 0
    faults: Faults = field(default_factory=Faults)
    failures: Counter[str] = field(default_factory=Counter[str])
    returns: list[Return] = field(default_factory=list[Return])
    latencies_s: list[float] = field(default_factory=list[float])
    answers_s: list[float] = field(default_factory=list[float])


class Caller:
    """Makes one call after the other, each over `url`."""

    def __init__(self, url: str, options: FabricBench, seen: Seen) -> None:
        self._url = url
        self._options = options
        self._seen = seen

    async def run(self, begin_s: float, end_s: float) -> None:
        """Call until the monotonic time `end_s`."""
        await asyncio.sleep(max(0.0, begin_s - time.monotonic()))
        while (left := int((end_s - time.monotonic()) / UNIT_S)) > _SHORTEST:
            count = int(self._options.session_s / UNIT_S)
            count = count if left - count > _SHORTEST else left  # the last call is longer
            is_scripted = self._options.checkpoint == "scripted"
            first = PROMPT_TOKENS + UNIT_TOKENS
            units = Units(first, UNIT_TOKENS) if is_scripted else Units()
            self._seen.calls += 1
            try:
                await self._call(units, count)
            except DuplexError as error:
                self._lost(units, str(error))
            except TimeoutError:
                self._lost(units, f"no answer to the last unit for {_ANSWER_S:g} s")
            self._seen.faults.add(units.end())
            self._seen.units += units.sent_count
            self._seen.latencies_s += units.latencies_s
            self._seen.answers_s += units.answers_s

    def _lost(self, units: Units, why: str) -> None:
        units.faults.calls_lost += 1
        if why in self._seen.failures or len(self._seen.failures) < _FAILURE_COUNT:
            self._seen.failures[why] += 1

    async def _call(self, units: Units, count: int) -> None:
        def returned(back: Return) -> None:
            self._seen.returns.append(back)
            lost = round(back.lost_samples / INPUT_RATE)
            units.returned(time.monotonic(), units.lost_count if back.away_s > _LONG_S else lost)

        session = DuplexSession(
            self._url,
            proxy=False,
            loads=orjson.loads,
            resumable=True,
            return_wait=self._wait_s,
            on_return=returned,
            on_event=lambda event: _check(event, units),
            connect_timeout_s=self._options.open_timeout_s,
            queue_timeout_s=self._options.open_timeout_s,
        )
        async with session:
            reading = asyncio.create_task(_read(session))
            try:
                await _send(session, units, count, reading)
                await session.close()
                await reading
            finally:
                reading.cancel()
                await asyncio.wait({reading})

    def _wait_s(self, attempt: int) -> float:
        """Return how long the client is away, or waits after an attempt that has failed."""
        return return_wait_s(attempt) if attempt else random.uniform(*self._options.return_range_s)


async def _send(
    session: DuplexSession, units: Units, count: int, reading: asyncio.Task[None]
) -> None:
    """Send a unit every second, and wait for the last answer, unless `reading` ends before."""
    begin_s = time.monotonic()
    for number in range(count):
        rest_s = begin_s + number * UNIT_S - time.monotonic()
        await asyncio.wait({reading}, timeout=max(0.0, rest_s))
        if reading.done():
            return
        units.sent(time.monotonic())
        await session.send(ENCODED_SOUND)
    has_last = asyncio.create_task(units.has_last.wait())
    await asyncio.wait({reading, has_last}, timeout=_ANSWER_S, return_when=_FIRST)
    if not reading.done() and not has_last.done():
        has_last.cancel()
        raise TimeoutError
    has_last.cancel()


async def _read(session: DuplexSession) -> None:
    async for _ in session:
        pass
    if session.end and session.end.reason not in _CLOSED:
        raise DuplexError(f"the server ended the call: {session.end.reason}")


def _check(event: Mapping[str, Any], units: Units) -> None:
    match event:
        case {"type": "response.output.delta", "unit": int(unit), "part": int(part)}:
            metrics: Mapping[str, Any] = event.get("metrics") or {}
            context = event.get("kv_cache_length", metrics.get("kv_cache_length", 0))
            dropped = metrics.get("dropped_units", 0) if part == 0 else 0
            units.event(unit, part, context, dropped, time.monotonic())
        case {"type": "session.resumed", "unit": int(unit), "next_sample": int(sample)}:
            units.resumed(unit, round(sample / INPUT_RATE))
        case _:
            pass
