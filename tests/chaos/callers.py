"""Callers of a fabric: each has one call after the other, and counts every unit of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from websockets.exceptions import ConnectionClosed

from duplane.fabric.audio import INPUT_RATE_HERTZ, samples_from_pcm
from duplane.tools.bench.load.sessions import SOUND
from duplane.tools.command import CommandError
from duplane.tools.talk.dialects import UnitReply
from duplane.tools.talk.sessions import TalkSession, Wish, begun
from duplane.worker.models.scripted.model import PROMPT_TOKENS, UNIT_TOKENS

UNIT_S = 1.0
FAULTS = ("lost", "doubled", "out of order", "closed")
_OPEN_S = 30.0
_ANSWER_S = 30.0  # for the last answers of a call
_LENGTHS = 10, 40  # units of the shortest and of the longest call
_LOUD_SHARE = 0.6
_SOUND = samples_from_pcm(SOUND)
_SILENCE = np.zeros(int(INPUT_RATE_HERTZ * UNIT_S), np.float32)


@dataclass(frozen=True)
class Wait:
    """The time from a unit to its answer."""

    caller: int
    sent_s: float  # monotonic time
    seconds: float


@dataclass
class Ledger:
    """What all callers have seen."""

    counts: Counter[str] = field(default_factory=Counter[str])
    waits: list[Wait] = field(default_factory=list[Wait])
    faults: list[str] = field(default_factory=list[str])

    def note(self, kind: str, count: int, text: str) -> None:
        """Count faults of one of the kinds in `FAULTS`."""
        if count:
            self.counts[kind] += count
            self.faults.append(f"{count} {kind}: {text}")


class WrongAnswerError(Exception):
    """The answers of a call are wrong. The call ends, because no later answer can be judged.

    `kind` is one of `FAULTS`.
    """

    def __init__(self, kind: str, text: str, count: int = 1) -> None:
        super().__init__(text)
        self.kind = kind
        self.count = count


class Units:
    """The units of one call, and their answers.

    A and C do not name the unit of an answer. But the scripted model speaks if a unit is loud, and
    each unit adds the same number of tokens to the context, so an answer shows which unit it is of.
    """

    def __init__(self, loud: Sequence[bool]) -> None:
        self.loud = loud
        self.sent_s: list[float] = []
        self.answered_count = 0
        self._parts: set[str] = set()  # kinds of the events about the unit answered last

    def answered(self, reply: UnitReply) -> float | None:
        """Check an answer; return when its unit was sent, or None if it adds to the last answer.

        Raises WrongAnswerError.
        """
        number, expected = reply.unit, self.answered_count
        part = "audio" if reply.audio else "text" if reply.text else "listen"
        if number == expected - 1 and part not in self._parts:
            self._parts.add(part)
            return None
        if number < expected or expected == len(self.sent_s):
            raise WrongAnswerError("doubled", f"unit {number} is answered again")
        context = PROMPT_TOKENS + UNIT_TOKENS * (expected + 1)
        lost_count = max(number - expected, (reply.context - context) // UNIT_TOKENS)
        if lost_count > 0:
            raise WrongAnswerError("lost", f"unit {expected} has no answer", lost_count)
        if reply.context != context or self.loud[expected] != bool(reply.text or reply.audio):
            raise WrongAnswerError(
                "out of order", f"not the answer of unit {expected}: {reply.context}"
            )
        self.answered_count += 1
        self._parts = {part}
        return self.sent_s[expected]


class Caller:
    """Calls an edge in one dialect, again and again."""

    def __init__(
        self, index: int, url: str, dialect: str, chooser: random.Random, ledger: Ledger
    ) -> None:
        self._index = index
        self._url = url
        self._dialect = dialect
        self._chooser = chooser
        self._ledger = ledger

    async def run(self, end_s: float) -> None:
        """Call until the monotonic time `end_s`."""
        await asyncio.sleep(self._chooser.random() * UNIT_S)
        while (left := int((end_s - time.monotonic()) / UNIT_S)) > 0:
            length = self._chooser.randint(*_LENGTHS)
            length = length if left - length >= _LENGTHS[0] else left  # the last call is longer
            units = Units([self._chooser.random() < _LOUD_SHARE for _ in range(length)])
            self._ledger.counts["calls"] += 1
            try:
                await self._call(units)
            except WrongAnswerError as wrong:
                self._note(wrong.kind, wrong.count, str(wrong))
            except (CommandError, ConnectionClosed) as error:
                self._note("closed", 1, str(error))
            except TimeoutError:
                self._note("closed", 1, "the call did not open or did not end in time")

    def _note(self, kind: str, count: int, text: str) -> None:
        self._ledger.note(kind, count, f"caller {self._index}, dialect {self._dialect}: {text}")

    async def _call(self, units: Units) -> None:
        wish = Wish(url=self._url, dialect=self._dialect, on_error=_unit_failed)
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(_OPEN_S):
                session = await stack.enter_async_context(begun(wish))
            reading = asyncio.create_task(self._read(session, units))
            try:
                await self._send(session, units, reading)
            finally:
                reading.cancel()
                await asyncio.wait({reading})
                self._ledger.counts["units"] += len(units.sent_s)
            async with asyncio.timeout(_OPEN_S):
                await session.close()
                async for reply in session.replies():
                    units.answered(reply)
        if session.end is None:
            raise CommandError("the connection ended without the last event")

    async def _send(self, session: TalkSession, units: Units, reading: asyncio.Task[None]) -> None:
        """Send a unit every second, and wait for the last answer. Raises what `_read` raises."""
        begin_s = time.monotonic()
        for number, is_loud in enumerate(units.loud):
            rest_s = begin_s + number * UNIT_S - time.monotonic()
            await asyncio.wait({reading}, timeout=max(0.0, rest_s))
            if reading.done():
                break
            units.sent_s.append(time.monotonic())
            await session.send(number, _SOUND if is_loud else _SILENCE)
        await asyncio.wait({reading}, timeout=_ANSWER_S)
        if not reading.done():
            count = len(units.sent_s) - units.answered_count
            raise WrongAnswerError("lost", f"unit {units.answered_count} has no answer", count)
        reading.result()

    async def _read(self, session: TalkSession, units: Units) -> None:
        """Read until every unit has an answer. Raises WrongAnswerError."""
        async for reply in session.replies():
            now_s = time.monotonic()
            sent_s = units.answered(reply)
            if sent_s is not None:
                self._ledger.waits.append(Wait(self._index, sent_s, now_s - sent_s))
            if units.answered_count == len(units.loud):
                return
        raise WrongAnswerError("closed", f"the server ended the call: {session.end}")


def _unit_failed(message: str) -> None:
    raise WrongAnswerError("lost", f"a unit has failed: {message}")
