"""The stream of events for pages of operators: one Watch of a scheduler for all pages of an edge.

The Watch runs while a page reads. Changes are collected for a moment, so that each worker, lease
and ticket is sent at most once in this time, however often it changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping

import orjson

from duplane.edge.access import Caller
from duplane.edge.clock import Clock
from duplane.edge.watching.fabric_view import FabricView
from duplane.edge.watching.reader import Reader
from duplane.edge.watching.unit_figures import SAMPLE_COUNT, STEP_S, Sample, UnitFigures
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError

_log = logging.getLogger(__name__)

MAX_READERS = 32
MAX_READERS_OF_ONE = 8  # pages of one operator
TICK_S = 0.2  # in which changes are collected
_RETRY_S = 1.0  # after a scheduler has ended the Watch, or none answers


class TooManyReadersError(Exception):
    """As many pages read as may read; the text says which bound is reached."""


class WatchFeed:
    """Follows the fabric while pages read, and sends each of them the same events.

    `facts` describes this edge.
    """

    def __init__(
        self,
        fabric: FabricClient,
        figures: UnitFigures,
        facts: Callable[[], Mapping[str, object]],
        clock: Clock,
    ) -> None:
        self._fabric = fabric
        self._figures = figures
        self._facts = facts
        self._clock = clock
        self._readers: set[Reader] = set()
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        self._view = FabricView()
        self._failure = ""  # why the view is out of date
        # The counts of the fabric at the ends of steps, by the Unix time.
        self._counts = deque[tuple[float, Mapping[str, int]]](maxlen=SAMPLE_COUNT)
        self._step = 0
        self._sent_number = 0  # of the last late unit or move that was sent
        # What all pages begin with that open, or begin again, before the next tick.
        self._first_events: bytes | None = None

    @contextlib.asynccontextmanager
    async def reading(self, caller: Caller) -> AsyncGenerator[Reader]:
        """Count one more page during the body of the `with`. Raises TooManyReadersError."""
        if len(self._readers) >= MAX_READERS:
            raise TooManyReadersError(f"{MAX_READERS} pages of operators are open")
        own = [one for one in self._readers if one.caller.credential == caller.credential]
        if len(own) >= MAX_READERS_OF_ONE:
            raise TooManyReadersError(f"{MAX_READERS_OF_ONE} pages of this operator are open")
        reader = Reader(caller, self._beginning)
        self._readers.add(reader)
        if self._is_closed:
            reader.end()
        elif self._running is None or self._running.done():
            self._start()
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if not self._readers:
                await self._stop()

    def end_invalid(self, problem: Callable[[Caller], str]) -> None:
        """End the streams of callers for which `problem` says why they must end."""
        for reader in self._readers:
            if problem(reader.caller):
                reader.end()

    async def close(self) -> None:
        """End all streams, also those that begin later."""
        self._is_closed = True
        for reader in self._readers:
            reader.end()
        await self._stop()

    def _start(self) -> None:
        self._view = FabricView()
        self._failure = ""
        self._first_events = None
        self._step = self._present_step()
        self._sent_number = self._figures.last_number
        self._running = asyncio.create_task(self._run())

    async def _stop(self) -> None:
        running, self._running = self._running, None
        if running:
            running.cancel()
            await asyncio.wait({running})

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow())
                tasks.create_task(self._publish())
        except Exception:  # noqa: BLE001 - the root of a task
            _log.exception("the stream for operators failed")
            for reader in self._readers:
                reader.end()

    async def _follow(self) -> None:
        """Keep the view up to date. While no scheduler answers, pages keep the last one."""
        while True:
            try:
                async with self._fabric.watch() as stream:
                    view = FabricView()
                    while True:
                        message = await stream.read()
                        for is_whole in view.note(message, self._clock.now().wall_s):
                            if is_whole:
                                self._show(view)
                            await asyncio.sleep(0)
            except FabricError as error:
                self._failure = error.message
                self._first_events = None
                self._send(self._failure_event())
            await asyncio.sleep(_RETRY_S)

    def _show(self, view: FabricView) -> None:
        """Send a view that has replaced all that was sent before."""
        self._view = view
        self._failure = ""
        self._first_events = None
        for reader in self._readers:
            reader.start_again()

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._first_events = None
            self._send_changes()
            step = self._present_step()
            if step != self._step:
                self._step = step
                self._send_figures(step - 1)

    def _present_step(self) -> int:
        return int(self._clock.now().wall_s / STEP_S)

    def _send(self, events: bytes) -> None:
        for reader in self._readers:
            reader.push(events)

    def _send_changes(self) -> None:
        if changes := self._view.changes():
            self._send(self._event("changes", changes))

    def _send_figures(self, step: int) -> None:
        """Send the sample of a step, and what has become late or has moved since the last one."""
        sample = self._figures.sample(step)
        row: dict[str, object] = {**sample._asdict()}
        if self._view.is_known and not self._failure:
            counts = self._view.counts()
            self._counts.append((sample.at_s, counts))
            row |= counts
        after, self._sent_number = self._sent_number, self._figures.last_number
        past = self._past(after, self._sent_number)
        figures = orjson.dumps({"sample": row, "edge": self._facts(), **past})
        self._send(self._event("figures", figures))

    def _past(self, after: int, last: int) -> dict[str, object]:
        return {
            "late_units": [unit._asdict() for unit in self._figures.late_units(after, last)],
            "moves": [move._asdict() for move in self._figures.moves(after, last)],
        }

    def _beginning(self) -> bytes:
        """Return the events with which a page begins, or begins again."""
        if self._first_events is None:
            self._first_events = self._whole()
        return self._first_events

    def _whole(self) -> bytes:
        self._send_changes()  # to the other pages: the snapshot has them
        past = self._past(0, self._sent_number)  # what comes later is sent to all pages
        figures = orjson.dumps({"samples": self._samples(), "edge": self._facts(), **past})
        whole = b"%b,%b" % (self._view.snapshot()[:-1], figures[1:])
        return self._event("snapshot", whole) + (self._failure_event() if self._failure else b"")

    def _samples(self) -> list[dict[str, object]]:
        rows: dict[float, dict[str, object]] = {
            sample.at_s: sample._asdict() for sample in self._figures.samples(self._step * STEP_S)
        }
        for at_s, counts in self._counts:
            rows.setdefault(at_s, Sample(at_s, 0, 0, None, None)._asdict()).update(counts)
        return [rows[at_s] for at_s in sorted(rows)][-SAMPLE_COUNT:]

    def _failure_event(self) -> bytes:
        return self._event("unavailable", orjson.dumps({"reason": self._failure}))

    def _event(self, name: str, fields: bytes) -> bytes:
        """Return an event of the stream. Its field `now` lets a page compare clocks."""
        now = orjson.dumps({"now": round(self._clock.now().wall_s, 3)})
        return b"event: %b\ndata: %b,%b\n\n" % (name.encode(), now[:-1], fields[1:])
