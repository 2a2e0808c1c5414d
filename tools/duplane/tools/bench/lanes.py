"""`duplane bench lanes`: how many units a model speaks per second, in one lane and in two."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from duplane.tools.bench.model import PROMPT_ROWS, TEXT_TOKENS, UNIT_ROWS, model_directory
from duplane.tools.bench.options import LaneBench
from duplane.tools.bench.report import show
from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.events import AnsweredUnit, Event
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.families import open_device
from duplane.worker.models.types import ConversationOptions, Opened, SpeechRequest, Unit
from duplane.worker.settings import WorkerSettings

LANES = (1, 2)
WARM_UNITS = 2
_OPTIONS = ConversationOptions(
    force_listen_count=0, seed=0, max_new_speak_tokens_per_chunk=TEXT_TOKENS + 1
)


async def bench_lanes(bench: LaneBench) -> None:
    """Load the model once for each number of lanes, and print a table.

    Raises LoadError, ValueError, and RuntimeError if a unit fails.
    """
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
        slot_count=max(bench.slots),
        context_token_limit=PROMPT_ROWS + (WARM_UNITS + bench.units) * UNIT_ROWS,
        engine_process="off",
        lanes=1 if lanes == 1 else 2,
    )
    engine = DeviceThread.from_settings(settings, open_device(settings))
    await engine.start()
    if engine.constants.lane_count != lanes:
        raise RuntimeError("the model does not run in two lanes; the log says why")
    yield engine
    await engine.stop()


async def _rate(engine: DeviceThread, slots: int, units: int) -> float:
    """Return the units per second that conversations speak; each sends when it is answered."""
    calls = [_Call(engine, slot) for slot in range(slots)]
    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            tasks.create_task(call.open(units))
    begin_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        speaking = [tasks.create_task(call.speak(units)) for call in calls]
    seconds = time.monotonic() - begin_s
    for call in calls:
        await engine.close(call.channel)
    return sum(task.result() for task in speaking) / seconds


class _Call:
    """A conversation that speaks a long text."""

    def __init__(self, engine: DeviceThread, slot: int) -> None:
        self._engine, self._slot = engine, slot
        self._events = asyncio.Queue[Event]()
        self.channel = engine.attach(slot, self._events.put_nowait)
        self._sound = np.random.default_rng(slot).normal(0, 0.1, 16_000).astype(np.float32)

    async def open(self, units: int) -> None:
        """Open the conversation, and let it speak its first units."""
        prepared = await self._engine.prepare_conversation(self.channel, _OPTIONS)
        self._engine.open(self.channel, prepared)
        opened = await self._events.get()
        if not isinstance(opened, Opened):
            raise RuntimeError(f"slot {self._slot} is not opened: {opened}")
        text = "yes " * (WARM_UNITS + units) * TEXT_TOKENS
        await self._send(SpeechRequest(0, text))
        await self.speak(WARM_UNITS - 1)

    async def speak(self, units: int) -> int:
        """Send units, each after the answer to the one before it; return how many speak."""
        return sum([await self._send() for _ in range(units)])

    async def _send(self, *speech: SpeechRequest) -> bool:
        unit = Unit(self._slot, self._sound, speech=speech)
        record = UnitRecord(unit, time.monotonic())
        self._engine.put(self.channel, await self._engine.prepare_unit(self.channel, record))
        answered = await self._events.get()
        if not isinstance(answered, AnsweredUnit):
            raise RuntimeError(f"slot {self._slot} has no answer: {answered}")
        return not answered.output.is_listen
