"""Engines of a worker for tests, in this process or in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

import numpy as np
from support.time_limits import WITHIN_S

from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.engine import AnyEngine
from duplane.worker.engine.engine_process import EngineProcess
from duplane.worker.engine.events import AnsweredUnit, Event, FailedUnit
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.families import open_device
from duplane.worker.models.types import ConversationOptions, Opened, Unit
from duplane.worker.settings import WorkerSettings

Kind = Literal["thread", "process"]
KINDS: tuple[Kind, ...] = ("thread", "process")
OPTIONS = ConversationOptions(seed=1)


def new_engine(kind: Kind, **settings: Any) -> AnyEngine:
    """Return an engine that is not started; by default, of the scripted model."""
    given = WorkerSettings(**{"checkpoint": "scripted", **settings})
    device = open_device(given)
    if kind == "process":
        return EngineProcess(device, given)
    return DeviceThread(device, given)


@contextlib.asynccontextmanager
async def running_engine(kind: Kind, **settings: Any) -> AsyncGenerator[AnyEngine]:
    """Start an engine, and stop it at the end."""
    engine = new_engine(kind, **settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


class Caller:
    """The call of one slot. `closed` says whether the slot was clean at the end."""

    def __init__(self, engine: AnyEngine, slot: int = 0) -> None:
        self.engine = engine
        self.events = asyncio.Queue[Event]()
        self.channel = engine.attach(slot, self.events.put_nowait)
        self.sent = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, engine: AnyEngine, slot: int = 0) -> AsyncGenerator[Caller]:
        """Hold an open conversation, and assert at the end that its slot is clean."""
        caller = cls(engine, slot)
        prepared = await engine.prepare_conversation(caller.channel, OPTIONS)
        engine.open(caller.channel, prepared)
        assert isinstance(await caller.event(), Opened)
        yield caller
        assert await engine.close(caller.channel)

    async def event(self) -> Event:
        async with asyncio.timeout(WITHIN_S):
            return await self.events.get()

    async def send(self, value: float = 0.0, sample_count: int = 16_000, **fields: Any) -> None:
        """Put a unit of one value into the inbox; the next event does not wait for it."""
        audio = np.full(sample_count, value, np.float32)
        unit = Unit(self.channel.slot, audio, sequence=self.sent, **fields)
        record = UnitRecord(unit, time.monotonic(), time.time_ns())
        self.sent += 1
        self.engine.put(self.channel, await self.engine.prepare_unit(self.channel, record))

    async def answer(self) -> AnsweredUnit:
        event = await self.event()
        assert isinstance(event, AnsweredUnit), event
        return event

    async def failure(self) -> FailedUnit:
        event = await self.event()
        assert isinstance(event, FailedUnit), event
        return event
