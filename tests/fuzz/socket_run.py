"""Sends mutated messages over sockets to a live edge, beside well-behaved clients.

Afterwards no task, stream, slot or open file may be left, and the log may hold no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from fuzz.cases import DIALECTS, SMALL, Case, make_case
from fuzz.faults import lines_of
from fuzz.random_fabric import RandomFabric
from fuzz.socket_clients import WITHIN_S, act, attack, check_well_behaved
from support.edge.live_edge import LiveEdge, live_edge

LIMITS = replace(
    SMALL,
    message_bytes=300_000,
    openai_message_bytes=300_000,
    chat_message_bytes=400_000,
    client_s=5.0,
    scheduler_s=60.0,  # generous, because one process runs everything
    close_s=1.0,
)
_WITNESSES = ("A", "B chat", "C")
_CALLERS = 12
_ATTACKS = 0.35  # share of the callers' actions
_SLOTS = 64
_ENOUGH_FAULTS = 5
# The names of gRPC's tasks that wait for calls: one task per method, one for all methods that the
# server does not have, and a new one with each call. The edge asks silent workers for their health.
_GRPC_ACCEPTS = ("_request_registered_call", "AioServer._request_call")
_FILES = Path("/proc/self/fd")


@dataclass(slots=True)
class SocketRun:
    """Counts of sent messages and answers, and the faults."""

    seed: str
    message_count: int = 0
    session_count: int = 0
    attacks: Counter[str] = field(default_factory=Counter)
    answers: dict[str, Counter[str]] = field(default_factory=dict)
    well_behaved_answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    busy_s: float = 0.0

    @property
    def sent_count(self) -> int:
        return self.message_count + sum(self.attacks.values())


async def rage(
    seed: str, *, sent_count: float = float("inf"), for_s: float = float("inf")
) -> SocketRun:
    """Run callers and attackers against an edge.

    Stop at a number of messages or faults, or after a time.
    """
    storm = SocketRun(seed)
    began = time.monotonic()

    def is_enough() -> bool:
        is_done = storm.sent_count >= sent_count or time.monotonic() - began >= for_s
        return is_done or len(storm.faults) >= _ENOUGH_FAULTS

    with _log_watched(storm):
        try:
            async with live_edge(LIMITS, slot_count=_SLOTS) as edge, _random_fabric(edge, seed):
                await _warm_up(edge)
                async with _nothing_left(edge, storm):
                    await _let_loose(edge, storm, is_enough)
        except TimeoutError:
            storm.faults.append("never comes to rest")
    storm.busy_s = time.monotonic() - began
    return storm


@contextlib.asynccontextmanager
async def _random_fabric(edge: LiveEdge, seed: str) -> AsyncGenerator[None]:
    speaking = asyncio.create_task(RandomFabric(edge.fabric, Random(seed)).run())
    try:
        yield
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)


async def _let_loose(edge: LiveEdge, storm: SocketRun, is_enough: Callable[[], bool]) -> None:
    calm = asyncio.Event()
    witnesses = {
        dialect: asyncio.create_task(check_well_behaved(edge, dialect, calm))
        for dialect in _WITNESSES
    }
    names = (f"{storm.seed}/{number}" for number in itertools.count())
    await asyncio.gather(*(_call(edge, names, storm, is_enough) for _ in range(_CALLERS)))
    calm.set()
    await _hear_witnesses(witnesses, storm)


async def _call(
    edge: LiveEdge, names: Iterator[str], storm: SocketRun, is_enough: Callable[[], bool]
) -> None:
    while not is_enough():
        name = next(names)
        rng = Random(name)
        case: Case | None = None
        try:
            if rng.random() < _ATTACKS:
                kind, count = await attack(edge, rng)
                storm.attacks[kind] += count
            else:
                case = make_case(name, rng.choice(DIALECTS))
                await _act(edge, case, rng, storm)
        except Exception as error:  # noqa: BLE001 - every exception is a fault
            where = "".join(traceback.format_exception(error, limit=-3))
            said = f"\n{lines_of(case)}" if case else ""
            storm.faults.append(f"{type(error).__name__}: {error}\nseed {name}\n{where}{said}")


async def _act(edge: LiveEdge, case: Case, rng: Random, storm: SocketRun) -> None:
    listener = await act(edge, case, rng)
    storm.session_count += 1
    storm.message_count += listener.sent_count
    storm.answers.setdefault(listener.dialect, Counter()).update(listener.answers)


async def _warm_up(edge: LiveEdge) -> None:
    """Open everything that stays open, such as the channels to the scheduler and the worker."""
    over = asyncio.Event()
    over.set()
    for dialect in _WITNESSES:
        await check_well_behaved(edge, dialect, over)
    await edge.get("/status")
    await edge.settled()


async def _hear_witnesses(witnesses: dict[str, asyncio.Task[int]], storm: SocketRun) -> None:
    for dialect, task in witnesses.items():
        try:
            storm.well_behaved_answers[dialect] = await task
        except Exception as error:  # noqa: BLE001 - every exception is a fault
            storm.faults.append(
                f"well-behaved client of {dialect}: {type(error).__name__}: {error}"
            )
    if not storm.faults and not all(storm.well_behaved_answers.values()):
        storm.faults.append(f"witnesses had no answers: {storm.well_behaved_answers}")


# --- leaks ---


@contextlib.asynccontextmanager
async def _nothing_left(edge: LiveEdge, storm: SocketRun) -> AsyncGenerator[None]:
    before = asyncio.all_tasks(), _open_files()
    yield
    try:
        async with asyncio.timeout(WITHIN_S):
            while not await _is_settled(edge):  # retry until unreleased grants have expired
                pass
            # Sockets close in the background, and no event reports that they have closed.
            while _tasks_since(before[0]) or _open_files() > before[1]:  # noqa: ASYNC110  nothing signals the end of foreign tasks
                await asyncio.sleep(0.01)
    except TimeoutError:
        fabric = edge.fabric
        storm.faults.append(
            f"left: {_tasks_since(before[0])}; {_open_files()} files, {before[1]} before;"
            f" {len(fabric.waiting)} wait, {len(fabric.streams)} streams, {fabric.leases}"
        )


async def _is_settled(edge: LiveEdge) -> bool:
    try:
        await edge.settled()
    except TimeoutError:
        return False
    return True


def _tasks_since(before: set[asyncio.Task[Any]]) -> list[str]:
    tasks = asyncio.all_tasks() - before
    left = [repr(task)[:300] for task in tasks if not task.done()]
    return [task for task in left if not any(name in task for name in _GRPC_ACCEPTS)]


def _open_files() -> int:
    return len(list(_FILES.iterdir())) if _FILES.is_dir() else 0


class _Watch(logging.Handler):
    def __init__(self, storm: SocketRun) -> None:
        super().__init__(logging.ERROR)
        self._storm = storm

    def emit(self, record: logging.LogRecord) -> None:
        # Failed sessions are expected, because the fabric fails at random.
        is_session_end = " ended after " in record.msg
        if is_session_end and "internal error" not in record.getMessage():
            return
        self._storm.faults.append(f"log of {record.name}: {self.format(record)[:3000]}")


@contextlib.contextmanager
def _log_watched(storm: SocketRun) -> Generator[None]:
    """Record unhandled exceptions and logged errors as faults, except failed sessions."""
    loop = asyncio.get_running_loop()
    root = logging.getLogger()
    watch = _Watch(storm)
    handler = loop.get_exception_handler()
    root.addHandler(watch)
    loop.set_exception_handler(
        lambda _, context: storm.faults.append(
            f"loop: {context.get('message')}: {context.get('exception')!r}"
        )
    )
    try:
        yield
    finally:
        root.removeHandler(watch)
        loop.set_exception_handler(handler)
