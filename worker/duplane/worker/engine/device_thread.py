"""The threads that may use the device, and the queues between them and the event loop.

The event loop queues work: conversations and chats to open, units, past units, slots to close. Each
thread is one lane of the device: it does this work launch by launch, and posts events back.
`schedule` chooses the launches, and `model_runner` calls the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from duplane.worker.engine.engine import JOIN_TIMEOUT_S, Engine
from duplane.worker.engine.events import Event
from duplane.worker.engine.inbox import Inbox
from duplane.worker.engine.model_runner import ModelRunner
from duplane.worker.engine.schedule import (
    Block,
    Launch,
    Limits,
    Work,
    next_due_s,
    next_llm,
    next_single,
    next_speech,
)
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import LaunchRecord
from duplane.worker.models.interface import Device
from duplane.worker.settings import WorkerSettings

SWITCH_INTERVAL_S = 0.0005
"""Interval at which Python switches threads in a process with a device thread. It is short, so that
the event loop and the threads of the lanes do not delay each other."""

_log = logging.getLogger(__name__)

_LIMITS = Limits()
_RECORDS = 64  # of launches in one report


class _Lane(Enum):
    """The launches that one thread runs. Only the first thread closes slots."""

    ALL = "all"
    LLM = "llm"
    SPEECH = "speech"


_Closing = tuple[SlotChannel, asyncio.Future[bool]]


class DeviceThread(Engine[SlotChannel]):
    """The device thread, with a second one if the device has two lanes, and their interface.

    A slot is in at most one launch. What needs both lanes (an opening, a share of a rebuild, the
    cleanup of a slot) runs on the first thread while the second one is between two launches.
    """

    def __init__(self, device: Device, settings: WorkerSettings) -> None:
        super().__init__()
        self._device = device
        self._settings = settings
        self._has_two_lanes = False
        self._lock = threading.Condition()
        self._channels: dict[int, SlotChannel] = {}
        # Channels to close, and the futures that get whether their slots are clean.
        self._closing: deque[_Closing] = deque()
        self._calls: dict[_Lane, float] = {}  # when the calls that run began
        self._is_reserved = False  # the first thread waits for both lanes, or uses both
        self._has_seen = False  # the last launch of the first thread was SEE
        self._records: list[LaunchRecord] = []  # that are not reported yet
        self._is_stopping = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    async def _load(self) -> None:
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._loaded

    async def _stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            self._lock.notify_all()
        if self._is_hung or not self._has_loaded:
            return  # a load or a hung call cannot be interrupted; it ends with the process
        done, _ = await asyncio.wait({self.ended}, timeout=JOIN_TIMEOUT_S)
        if not done:
            _log.error("the device thread does not end; the process exits without it")
        elif error := self.ended.exception():
            _log.error("the device thread had failed: %r", error)

    def attach(self, slot: int, on_event: Callable[[Event], None]) -> SlotChannel:
        inbox = Inbox(self.constants.count_of(self._settings.limits.inbox_unit_count))
        channel = SlotChannel(slot, inbox, on_event)
        with self._lock:
            if slot in self._channels:
                raise ValueError(f"slot {slot} is in use")
            self._channels[slot] = channel
        return channel

    def tell(self, channel: SlotChannel, method: str, **arguments: object) -> None:
        with self._lock:
            self._lock.notify_all()
            getattr(channel, method)(**arguments)

    async def _close(self, channel: SlotChannel) -> bool:
        is_clean: asyncio.Future[bool] = self._loop.create_future()
        with self._lock:
            self._closing.append((channel, is_clean))
            self._lock.notify_all()
        return await is_clean

    # The methods below run on the threads of the device.

    def _run(self) -> None:
        try:
            tolerance_bytes = self._settings.memory_tolerance_bytes
            shared = self._channels, self._post, self._lock
            runner = ModelRunner(self._device, tolerance_bytes, *shared)
            self._has_two_lanes = runner.model.constants.lane_count == 2
            first = _Lane.LLM if self._has_two_lanes else _Lane.ALL
            with self._entered(first):
                runner.warm_up()
        except Exception as error:  # noqa: BLE001 - the root of a thread; `start` raises it again
            self._call(self._resolve, self._loaded, error)
            self._call(self._resolve, self.ended, None)
            return
        self._preparer, self.constants = runner.preparer, runner.model.constants
        self.description = self._device.description()
        self.memory_used_bytes = runner.memory_used_bytes
        self._call(self._resolve, self._loaded, None)
        arguments = runner, _Lane.SPEECH
        speech = threading.Thread(target=self._work, args=arguments, name="speech", daemon=True)
        if self._has_two_lanes:
            speech.start()
        self._work(runner, first)
        if self._has_two_lanes:
            speech.join()
        self._call(self._resolve, self.ended, self._failure)

    def _work(self, runner: ModelRunner, lane: _Lane) -> None:
        """Run the launches of a lane until the thread stops, or until one of both has failed."""
        try:
            while (task := self._next(lane)) is not None:
                with self._entered(lane):
                    if isinstance(task, Launch):
                        runner.advance(task)
                    else:
                        self._close_slot(runner, *task)
                self._end_call(lane, task)
        except Exception as error:  # noqa: BLE001 - the root of a thread; `watch` raises it again
            with self._lock:
                self._failure = self._failure or error
                self._is_stopping = True
                self._calls.pop(lane, None)
                self.busy_since_s = min(self._calls.values(), default=None)
                self._lock.notify_all()

    def _entered(self, lane: _Lane) -> contextlib.AbstractContextManager[None]:
        return self._device.lane(lane.value) if self._has_two_lanes else contextlib.nullcontext()

    def _next(self, lane: _Lane) -> Launch | _Closing | None:
        """Wait for the next task of a lane, and begin it; None if the thread stops."""
        with self._lock:
            while not self._is_stopping:
                if lane is _Lane.SPEECH and self._is_reserved:
                    self._lock.wait()
                    continue
                task = self._choose(lane)
                if isinstance(task, int | float):
                    self._report()
                    self._lock.wait(task if task < math.inf else None)
                    continue
                if lane is _Lane.LLM and (not isinstance(task, Launch) or task.block.is_shared):
                    self._is_reserved = True
                    self._lock.wait_for(lambda: _Lane.SPEECH not in self._calls)
                self._calls[lane] = time.monotonic()
                self.busy_since_s = min(self._calls.values())
                return task
        return None

    def _choose(self, lane: _Lane) -> Launch | _Closing | float:
        """Return the next task of a lane, or the longest time to wait for one, in seconds.

        The slots of a launch are then in no other one. Posts the answers to refused units whose
        turn has come.
        """
        if self._closing and lane is not _Lane.SPEECH:
            return self._closing.popleft()
        now_s, waiting, is_shared = time.monotonic(), list[Work](), False
        for channel in self._channels.values():
            for answer in channel.answers():
                self._post(channel, answer)
            is_shared |= channel.is_ready
            if work := channel.work():
                waiting.append(work)
        launch = self._launch(lane, waiting, now_s, is_shared=is_shared)
        if launch is None:
            return next_due_s(waiting, now_s) - now_s
        for item in launch.items:
            self._channels[item.slot].run(item, len(launch.items), now_s)
        return launch

    def _launch(
        self, lane: _Lane, waiting: Sequence[Work], now_s: float, *, is_shared: bool
    ) -> Launch | None:
        """Return the next launch of a lane; None if there is none now."""
        if lane is _Lane.SPEECH:
            return next_speech(waiting, _LIMITS, now_s, is_shared=is_shared)
        choose = next_llm if lane is _Lane.LLM else next_single
        launch = choose(waiting, _LIMITS, now_s, is_shared=is_shared, has_seen=self._has_seen)
        if launch is not None:
            self._has_seen = launch.block is Block.SEE
        return launch

    def _end_call(self, lane: _Lane, task: Launch | _Closing) -> None:
        """Note that a task of a lane has ended. Its slots may then run in the other lane."""
        with self._lock:
            begin_s = self._calls.pop(lane)
            self.busy_since_s = min(self._calls.values(), default=None)
            if lane is not _Lane.SPEECH:
                self._is_reserved = False
            if isinstance(task, Launch):
                now_s = time.monotonic()
                for item in task.items:
                    self._channels[item.slot].end_run(begin_s, now_s)
                launched = LaunchRecord(task.block.value, len(task.items), now_s - begin_s)
                self._records.append(launched)
                if len(self._records) >= _RECORDS:
                    self._report()
            self._lock.notify_all()

    def _report(self) -> None:
        """Report the launches since the last report."""
        if self._records:
            self._call(self.on_launches, self._records)
            self._records = []

    def _close_slot(
        self, runner: ModelRunner, channel: SlotChannel, resolved: asyncio.Future[bool]
    ) -> None:
        """Clean the slot of a closed channel."""
        is_clean = runner.close(channel.slot)
        self.memory_used_bytes = runner.memory_used_bytes
        with self._lock:
            del self._channels[channel.slot]
        self._call(self._resolve, resolved, is_clean)

    def _post(self, channel: SlotChannel, event: Event) -> None:
        self._call(channel.on_event, event)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _log.warning("the event loop is closed; an event of the device thread is lost")
