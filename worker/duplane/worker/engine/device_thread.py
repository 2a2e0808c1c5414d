"""The one thread that may use the device, and the queues between it and the event loop.

The event loop queues work: conversations and chats to open, units, past units, slots to close. The
device thread does this work in rounds and posts events back. `round` chooses the work of a round,
and `model_runner` calls the model.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from duplane.worker.engine.engine import JOIN_TIMEOUT_S, Engine
from duplane.worker.engine.events import DroppedUnit, Event
from duplane.worker.engine.inbox import Entry, Inbox
from duplane.worker.engine.model_runner import ModelRunner
from duplane.worker.engine.round import choose
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import BatchRecord
from duplane.worker.models.interface import Device, Open, StartChat
from duplane.worker.models.types import PastUnit
from duplane.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)


class DeviceThread(Engine[SlotChannel]):
    """The device thread and its interface."""

    def __init__(
        self,
        device: Device,
        *,
        memory_tolerance_bytes: int,
        inbox_unit_count: int,
        rows_per_round: int,
    ) -> None:
        """Bound each inbox by `inbox_unit_count` units, or seconds if units are shorter."""
        super().__init__()
        self._device = device
        self._memory_tolerance_bytes = memory_tolerance_bytes
        self._inbox_unit_count = inbox_unit_count
        self._rows_per_round = rows_per_round
        self._lock = threading.Condition()
        self._channels: dict[int, SlotChannel] = {}
        # Channels to close, and the futures that get whether their slots are clean.
        self._closing: deque[tuple[SlotChannel, asyncio.Future[bool]]] = deque()
        self._numbers = itertools.count(1)  # for `SlotChannel.since`
        self._is_stopping = False
        self._has_loaded = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    @classmethod
    def from_settings(cls, settings: WorkerSettings, device: Device) -> DeviceThread:
        """Return the device thread of a worker with these settings."""
        return cls(
            device,
            memory_tolerance_bytes=settings.memory_tolerance_bytes,
            inbox_unit_count=settings.limits.inbox_unit_count,
            rows_per_round=settings.rows_per_round,
        )

    async def _load(self) -> None:
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._loaded

    async def _stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        if self._is_hung or not self._has_loaded:
            return  # a load or a hung call cannot be interrupted; it ends with the process
        done, _ = await asyncio.wait({self.ended}, timeout=JOIN_TIMEOUT_S)
        if not done:
            _log.error("the device thread does not end; the process exits without it")
        elif error := self.ended.exception():
            _log.error("the device thread had failed: %r", error)

    def attach(self, slot: int, on_event: Callable[[Event], None]) -> SlotChannel:
        inbox = Inbox(self.constants.count_of(self._inbox_unit_count))
        channel = SlotChannel(slot, inbox, on_event)
        with self._lock:
            if slot in self._channels:
                raise ValueError(f"slot {slot} is in use")
            self._channels[slot] = channel
        return channel

    def begin(self, channel: SlotChannel, item: Open | StartChat, credit: int = 0) -> None:
        with self._lock:
            channel.credit = credit
            channel.next = item
            channel.since = next(self._numbers)
            self._lock.notify()

    def return_credit(self, channel: SlotChannel) -> None:
        with self._lock:
            channel.credit += 1
            self._lock.notify()

    def rebuild(
        self, channel: SlotChannel, units: Sequence[PastUnit], *, has_more: bool = False
    ) -> None:
        with self._lock:
            if channel.rebuild_since is None:
                channel.rebuild_since = next(self._numbers)
            channel.past_units = list(units)
            channel.has_more_past = has_more
            self._lock.notify()

    def _put(self, channel: SlotChannel, entry: Entry) -> None:
        with self._lock:
            dropped = channel.inbox.put(entry)
            self._lock.notify()
        if dropped:
            channel.on_event(DroppedUnit(dropped))

    def mute(self, channel: SlotChannel) -> None:
        with self._lock:
            channel.is_muted = True
            channel.is_ready = False
            channel.inbox.clear()
            channel.past_units = None

    async def _close(self, channel: SlotChannel) -> bool:
        is_clean: asyncio.Future[bool] = self._loop.create_future()
        with self._lock:
            self._closing.append((channel, is_clean))
            self._lock.notify()
        return await is_clean

    # The methods below run on the device thread.

    def _run(self) -> None:
        try:
            runner = ModelRunner(
                self._device,
                self._memory_tolerance_bytes,
                self._channels,
                self._post,
                on_batch=self._post_batch,
                lock=self._lock,
                numbers=self._numbers,
            )
        except Exception as error:  # noqa: BLE001 - the root of a thread; `start` raises it again
            self._call(self._resolve, self._loaded, error)
            self._call(self._resolve, self.ended, None)
            return
        self._preparer, self.constants = runner.preparer, runner.model.constants
        self.description = self._device.description()
        self.memory_used_bytes = runner.memory_used_bytes
        self._has_loaded = True
        self._call(self._resolve, self._loaded, None)
        try:
            while not self._is_stopping:
                self._run_round(runner)
        except Exception as error:  # noqa: BLE001 - the root of a thread; `watch` raises it again
            self._call(self._resolve, self.ended, error)
        else:
            self._call(self._resolve, self.ended, None)

    def _run_round(self, runner: ModelRunner) -> None:
        """Clean slots, choose the work of a round, and let the model advance it.

        If there is no work, wait.
        """
        self._close_slots(runner)
        with self._lock:
            chosen = choose(self._channels.values(), self._rows_per_round)
            launch = next(chosen.launches, None)
            has_work = chosen.answers or launch or self._closing
            if not (has_work or self._is_stopping):
                self._lock.wait()
        for slot, answer in chosen.answers:
            self._post(self._channels[slot], answer)
        while launch is not None:
            self.busy_since_s = time.monotonic()
            runner.advance(launch)
            with self._lock:
                launch = next(chosen.launches, None)
        self.busy_since_s = None

    def _close_slots(self, runner: ModelRunner) -> None:
        """Clean the slots whose channels are closed."""
        while self._closing:  # only this thread removes entries
            channel, resolved = self._closing.popleft()
            self.busy_since_s = time.monotonic()
            is_clean = runner.close(channel.slot)
            self.memory_used_bytes = runner.memory_used_bytes
            with self._lock:
                del self._channels[channel.slot]
            self._call(self._resolve, resolved, is_clean)
        self.busy_since_s = None

    def _post(self, channel: SlotChannel, event: Event) -> None:
        self._call(channel.on_event, event)

    def _post_batch(self, batch: BatchRecord) -> None:
        self._call(self.on_batch, batch)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _log.warning("the event loop is closed; an event of the device thread is lost")

    # Runs on the event loop.

    @staticmethod
    def _resolve(future: asyncio.Future[object], outcome: object) -> None:
        if future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
