"""`duplane bench lanes`: how many units a model speaks per second, in one lane and in two."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from duplane.tools.bench.model import PROMPT_ROWS, TEXT_TOKENS, UNIT_ROWS, model_directory
from duplane.tools.bench.options import LaneBench
from duplane.tools.bench.report import show
from duplane.worker.engine.device_thread import SWITCH_INTERVAL_S, DeviceThread
from duplane.worker.engine.events import AnsweredUnit, Event
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.families import open_device
from duplane.worker.models.interface import LoadError
from duplane.worker.models.types import ConversationOptions, Opened, SpeechRequest, Unit
from duplane.worker.settings import WorkerSettings

LANES = (1, 2)
_OPTIONS = ConversationOptions(
    force_listen_count=0, seed=0, max_new_speak_tokens_per_chunk=TEXT_TOKENS + 1
)


async def bench_lanes(bench: LaneBench) -> None:
    """Load the model once for each number of lanes, and print a table.

    Raises LoadError, ValueError, and RuntimeError if a unit fails.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with model_directory(bench) as directory:
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(_engine(bench, directory, lanes)) for lanes in LANES
            ]
            for slots in bench.slots:
                rates = [
                    [await _rate(engine, slots, bench.units) for engine in engines]
                    for _ in range(bench.runs)
                ]
                _show(slots, rates)


def _show(slots: int, rates: list[list[float]]) -> None:
    """Print the units per second of each run, in one lane and in two."""
    rows = [(*run, run[1] / run[0]) for run in rates]
    named = [(str(number), row) for number, row in enumerate(rows, 1)]
    named.append(("median", tuple(map(statistics.median, zip(*rows, strict=True)))))
    show(
        f"{slots} conversations speak, units per second",
        ("run", "one lane", "two lanes", "ratio"),
        [(name, *(f"{number:.2f}" for number in row)) for name, row in named],
    )


@asynccontextmanager
async def _engine(bench: LaneBench, directory: Path, lanes: int) -> AsyncGenerator[DeviceThread]:
    """Run the device thread of a worker."""
    settings = WorkerSettings(
        checkpoint=directory,
        device=bench.device,
        dtype=bench.dtype,
        threads=bench.threads,
        slot_count=max(2, *bench.slots),
        context_token_limit=PROMPT_ROWS + (1 + bench.units) * UNIT_ROWS,
        engine_process="off",
        lanes=1 if lanes == 1 else 2,
    )
    engine = DeviceThread(open_device(settings), settings)
    await engine.start()
    if engine.constants.lane_count != lanes:
        raise LoadError("the model does not run in two lanes; the log says why")
    yield engine
    await engine.stop()


async def _rate(engine: DeviceThread, slots: int, units: int) -> float:
    """Return the units per second that conversations speak.

    Each sends a unit when the one before it is answered. They begin one after the other, so that
    they are in different parts of their units. Only the time in which all speak counts.
    """
    calls = [_Call(engine, slot) for slot in range(slots)]
    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            await call.open(units)
            tasks.create_task(call.speak(units))
    for call in calls:
        await engine.close(call.channel)
    begin_s = max(call.spoken_s[0] for call in calls)
    end_s = min(call.spoken_s[-1] for call in calls)
    spoken = sum(begin_s < spoken_s <= end_s for call in calls for spoken_s in call.spoken_s)
    return spoken / (end_s - begin_s)


class _Call:
    """A conversation that speaks a long text. `spoken_s` has the times of its answers."""

    def __init__(self, engine: DeviceThread, slot: int) -> None:
        self._engine, self._slot = engine, slot
        self._events = asyncio.Queue[Event]()
        self.channel = engine.attach(slot, self._events.put_nowait)
        self._sound = np.random.default_rng(slot).normal(0, 0.1, 16_000).astype(np.float32)
        self.spoken_s: list[float] = []

    async def open(self, units: int) -> None:
        """Open the conversation, and let it speak its first unit."""
        prepared = await self._engine.prepare_conversation(self.channel, _OPTIONS)
        self._engine.open(self.channel, prepared)
        opened = await self._events.get()
        if not isinstance(opened, Opened):
            raise RuntimeError(f"slot {self._slot} is not opened: {opened}")
        await self._send(SpeechRequest(0, "yes " * (units + 1) * TEXT_TOKENS))

    async def speak(self, units: int) -> None:
        """Send units, each after the answer to the one before it."""
        for _ in range(units):
            await self._send()

    async def _send(self, *speech: SpeechRequest) -> None:
        unit = Unit(self._slot, self._sound, speech=speech)
        record = UnitRecord(unit, time.monotonic())
        self._engine.put(self.channel, await self._engine.prepare_unit(self.channel, record))
        answered = await self._events.get()
        if not isinstance(answered, AnsweredUnit):
            raise RuntimeError(f"slot {self._slot} has no answer: {answered}")
        if not answered.output.is_listen:
            self.spoken_s.append(time.monotonic())
