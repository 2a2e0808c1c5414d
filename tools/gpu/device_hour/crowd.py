"""Conversations at the pace of real time on the worker's device thread: the table of latencies."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from device_hour.driver import OPTIONS, Driver
from device_hour.session import Loaded, Session
from duplane.fabric.files import write_atomically
from duplane.tools.bench.report import percentile
from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.events import AnsweredUnit, Event, FailedUnit, Lost
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.interface import Model, Preparer
from duplane.worker.models.torch_device import EnterLane, TorchDevice
from duplane.worker.models.types import Opened, Unit
from duplane.worker.settings import WorkerSettings

TABLE = "latency.md"
TURN_UNITS, PAUSE_UNITS = (3, 10), (3, 10)
"""The shortest and the longest turn and pause between turns, in units."""
INTERRUPTED = 0.25
"""The share of turns that the caller interrupts after two units."""
LATE_S = 1.0
OUTLIER = 5
MOST_OUTLIERS = 30
SHARES = (0.5, 0.95, 0.99)
COUNTED = ("late", "dropped", "turns_ended")
HEAD = (
    *("conversations", "listening p50", "p95", "p99", "speaking p50", "p95", "p99"),
    *("later than 1 s", "dropped", "turns ended"),
)
ANSWERED_S = 60.0
"""The longest wait for the last answers."""


@dataclass
class Answer:
    """A unit's answer: its seconds, the size of its batch, and the seconds of its stages."""

    is_listen: bool
    seconds: float
    batch: int
    stage_s: dict[str, float]


@dataclass
class Figures:
    """What was counted with one number of conversations."""

    answers: list[Answer] = field(default_factory=list[Answer])
    turns: int = 0
    interrupted: int = 0
    dropped: int = 0
    failed: int = 0
    unclean: int = 0

    def seconds(self, *, is_listen: bool) -> list[float]:
        """Return the latencies of units that listen, or of those that speak."""
        return [one.seconds for one in self.answers if one.is_listen == is_listen]

    def outliers(self) -> list[dict[str, Any]]:
        """Return the slowest units above `OUTLIER` times the median of their kind."""
        medians = {
            kind: statistics.median(self.seconds(is_listen=kind) or [float("inf")])
            for kind in (True, False)
        }
        slow = [one for one in self.answers if one.seconds > OUTLIER * medians[one.is_listen]]
        slow.sort(key=lambda one: -one.seconds)
        return [
            {
                "is_listen": one.is_listen,
                "ms": 1e3 * one.seconds,
                "batch": one.batch,
                "stages_ms": {stage: 1e3 * spent for stage, spent in one.stage_s.items()},
            }
            for one in slow[:MOST_OUTLIERS]
        ]


class _Ready:
    """Implements `TorchFamily` with a model that is loaded already."""

    def __init__(self, loaded: Loaded, dtype: str) -> None:
        self._loaded, self._dtype = loaded, dtype

    def choose_dtype(self, settings: WorkerSettings, device: torch.device) -> str:
        """Return the model's dtype."""
        del settings, device
        return self._dtype

    def load(
        self, settings: WorkerSettings, dtype: str, enter: EnterLane
    ) -> tuple[Preparer, Model]:
        """Return the model."""
        del settings, dtype
        return self._loaded.driver.preparer, self._loaded.served(enter)

    def load_preparer(self, settings: WorkerSettings) -> Preparer:
        """Return the preparer of the model."""
        del settings
        return self._loaded.driver.preparer


def crowd(session: Session) -> dict[str, Any]:
    """Return the latencies by number of conversations, and write them as a table in Markdown.

    A latency is the time from the arrival of a unit at the device thread to its answer. Each
    conversation sends a unit per second, begins at its own fraction of the second, and has turns
    and pauses; some turns are interrupted. Raises DeviceLostError.
    """
    return asyncio.run(_crowd(session))


async def _crowd(session: Session) -> dict[str, Any]:
    loaded, options = session.loaded(), session.options
    settings = WorkerSettings(
        checkpoint=session.checkpoint()[0],
        device=options.device_name,
        threads=torch.get_num_threads(),
    )
    device = TorchDevice(settings, _Ready(loaded, options.dtype))
    thread = DeviceThread(device, settings)
    await thread.start()
    watching = asyncio.create_task(
        thread.watch(settings.stuck_after_s, settings.hung_after_s, _ignore)
    )
    measuring = asyncio.create_task(_measure(session, loaded.driver, thread))
    await asyncio.wait({watching, measuring}, return_when=asyncio.FIRST_COMPLETED)
    if watching.done():
        measuring.cancel()
        watching.result()
    await thread.stop()
    await watching
    return measuring.result()


async def _ignore(is_stuck: bool) -> None:
    """Ignore a call that takes long: its units are late."""
    del is_stuck


async def _measure(session: Session, driver: Driver, thread: DeviceThread) -> dict[str, Any]:
    """Measure a few conversations, more of them, and then all slots, as long as there is time."""
    sizes, most = session.sizes, driver.model.constants.slot_count
    found: dict[str, Any] = {}
    for count in sorted({1, max(1, most // 4), max(1, most // 2), most}):
        seconds = sizes.full_crowd_s if count == most else sizes.crowd_s
        if not session.has_time(sizes.warm_s + seconds):
            break
        figures = await _Crowd(session, driver, thread, count).run(seconds)
        found[str(count)] = _numbers(figures)
        session.keep(found)
        _write_table(session, found)
    return found


class _Crowd:
    """Conversations in the first slots of a device thread."""

    def __init__(self, session: Session, driver: Driver, thread: DeviceThread, count: int) -> None:
        self._driver, self._thread, self._count = driver, thread, count
        self._longest, self._warm_s = session.sizes.context // 2, session.sizes.warm_s
        self._figures = Figures()
        self._waiting: Counter[int] = Counter()  # units without an answer, by slot
        self._is_idle = asyncio.Event()
        self._turns_ended = [0] * count
        self._lost: set[int] = set()

    async def run(self, seconds: float) -> Figures:
        """Let the conversations talk; return the figures, without those of the first seconds."""
        channels = [await self._open(slot) for slot in range(self._count)]
        end_s = time.monotonic() + self._warm_s + seconds
        async with asyncio.TaskGroup() as tasks:
            for channel in channels:
                tasks.create_task(self._talk(channel, end_s))
            await asyncio.sleep(self._warm_s)
            self._figures = Figures()
        self._is_idle.clear()
        if self._waiting.total():
            await asyncio.wait_for(self._is_idle.wait(), ANSWERED_S)
        for channel in channels:
            self._figures.unclean += not await self._thread.close(channel)
        return self._figures

    async def _open(self, slot: int) -> SlotChannel:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_event(event: Event) -> None:
            if isinstance(event, Opened):
                opened.set_result(None)
            elif isinstance(event, Lost) and not opened.done():
                opened.set_exception(RuntimeError(f"slot {slot} was lost while it opened"))
            else:
                self._count_event(slot, event)

        channel = self._thread.attach(slot, on_event)
        rows = random.Random(slot).randint(0, self._longest)
        self._thread.open(channel, self._driver.conversation(OPTIONS, rows))
        await opened
        return channel

    async def _talk(self, channel: SlotChannel, end_s: float) -> None:
        """Send a unit each second, at a fraction of the second that is the slot's own."""
        drawn = random.Random(channel.slot)
        due_s = time.monotonic() + drawn.random()
        for unit in self._units(channel.slot, drawn):
            if due_s >= end_s or channel.slot in self._lost:
                return
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            due_s += 1.0
            self._waiting[channel.slot] += 1
            if self._thread.put(channel, UnitRecord(self._driver.prepared(unit))) is not None:
                self._figures.dropped += 1
                self._end(channel.slot, 1)

    def _units(self, slot: int, drawn: random.Random) -> Iterator[Unit]:
        """Yield units of pauses and turns. A turn lasts until its end, unless it is interrupted."""
        pause = drawn.randint(0, PAUSE_UNITS[1])
        while True:
            for _ in range(pause):
                yield self._driver.noise(slot, force_listen=True)
            ended = self._turns_ended[slot]
            length = drawn.randint(*TURN_UNITS)
            speech = self._driver.speech(length)
            for _ in range(2 if drawn.random() < INTERRUPTED else length + 1):
                if self._turns_ended[slot] > ended:
                    break
                yield replace(self._driver.noise(slot), speech=speech)
                speech = ()
            pause = drawn.randint(*PAUSE_UNITS)

    def _count_event(self, slot: int, event: Event) -> None:
        match event:
            case AnsweredUnit(record, output):
                seconds = record.finished_s - record.queued_s
                answer = Answer(output.is_listen, seconds, record.batch_size, output.stage_s)
                self._figures.answers.append(answer)
                self._figures.turns += output.end_of_turn
                self._figures.interrupted += output.interrupted_turn
                self._turns_ended[slot] += output.end_of_turn
                self._end(slot, 1)
            case FailedUnit():
                self._figures.failed += 1
                self._end(slot, 1)
            case Lost():
                self._figures.failed += 1
                self._lost.add(slot)
                self._end(slot, self._waiting[slot])
            case _:
                pass

    def _end(self, slot: int, unit_count: int) -> None:
        """Wait no longer for this number of the slot's units."""
        self._waiting[slot] -= unit_count
        if not self._waiting.total():
            self._is_idle.set()


def _numbers(figures: Figures) -> dict[str, Any]:
    kinds = {"listening": True, "speaking": False}
    seconds = {kind: figures.seconds(is_listen=listens) for kind, listens in kinds.items()}
    return {
        "units": len(figures.answers),
        "late": sum(one.seconds > LATE_S for one in figures.answers),
        "dropped": figures.dropped,
        "failed": figures.failed,
        "unclean": figures.unclean,
        "turns_ended": figures.turns,
        "turns_interrupted": figures.interrupted,
        "outliers": figures.outliers(),
    } | {
        f"{kind}_ms": [1e3 * percentile(values, share) if values else None for share in SHARES]
        for kind, values in seconds.items()
    }


def _write_table(session: Session, found: dict[str, Any]) -> None:
    """Write and print the table for `docs/figures.md`."""
    lines = [f"| {' | '.join(HEAD)} |", "|---:" * len(HEAD) + "|"]
    for count, numbers in found.items():
        times = (*numbers["listening_ms"], *numbers["speaking_ms"])
        texts = ["" if value is None else f"{value:.0f}" for value in times]
        counted = [str(numbers[name]) for name in COUNTED]
        lines.append(f"| {' | '.join([count, *texts, *counted])} |")
    text = "\n".join(lines) + "\n"
    write_atomically(session.options.out / TABLE, text.encode())
    print(f"\nms from the arrival of a unit at the worker's device thread\n\n{text}", flush=True)
