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
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from duplane.worker.engine.events import Event, FailedUnit
from duplane.worker.engine.inbox import Entry, Inbox
from duplane.worker.engine.model_runner import ModelRunner
from duplane.worker.engine.preparation import ThreadPools, prepare_pictures, prepare_unit
from duplane.worker.engine.round import choose
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import BatchRecord, UnitRecord
from duplane.worker.models.chat import ChatRequest
from duplane.worker.models.interface import (
    Device,
    DeviceLostError,
    ModelConstants,
    Open,
    PreparedChat,
    PreparedConversation,
    Preparer,
    StartChat,
)
from duplane.worker.models.types import ConversationOptions, PastUnit, PreparedPicture

if TYPE_CHECKING:  # a base install has no Pillow
    from PIL.Image import Image

_log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0  # longest wait for the end of the thread; then the process ends without it


class DeviceThread:
    """The device thread and its interface. All public methods are for the event loop."""

    def __init__(
        self,
        device: Device,
        *,
        memory_tolerance_bytes: int,
        inbox_unit_count: int,
        rows_per_round: int,
    ) -> None:
        """Bound each inbox by `inbox_unit_count` units, or seconds if units are shorter."""
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
        self._is_hung = False
        self._busy_since_s: float | None = None
        self._runner: ModelRunner | None = None
        self._pools = ThreadPools()
        # Called after the settle of each batch.
        self.on_batch: Callable[[BatchRecord], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    async def start(self) -> None:
        """Start the thread, load the model and warm it up. Raises the exceptions of loading."""
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._loaded

    async def stop(self) -> None:
        """End the thread after its current call into the model."""
        self._pools.stop()
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        if self._runner is None or self._is_hung:
            return  # a load or a hung call cannot be interrupted; it ends with the process
        done, _ = await asyncio.wait({self._ended}, timeout=_JOIN_TIMEOUT_S)
        if not done:
            _log.error("the device thread does not end; the process exits without it")
        elif error := self._ended.exception():
            _log.error("the device thread had failed: %r", error)

    async def watch(
        self,
        stuck_after_s: float,
        hung_after_s: float,
        on_stuck: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Report calls into the model that take too long, until the device thread ends.

        Calls `on_stuck(True)` when a call exceeds `stuck_after_s`, and `on_stuck(False)` when this
        call returns. Raises DeviceLostError if a call exceeds `hung_after_s`. If an exception has
        ended the thread, raises this exception.
        """
        is_stuck = False
        while not self._ended.done():
            await asyncio.wait({self._ended}, timeout=min(stuck_after_s, hung_after_s) / 4)
            since_s = self._busy_since_s
            busy_s = 0.0 if since_s is None else time.monotonic() - since_s
            if busy_s > hung_after_s:
                self._is_hung = True
                raise DeviceLostError(f"a call into the model has not returned for {busy_s:.0f} s")
            if is_stuck != (busy_s > stuck_after_s):
                is_stuck = not is_stuck
                await on_stuck(is_stuck)
        self._ended.result()

    @property
    def _started(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the device thread has not loaded the model")
        return self._runner

    @property
    def constants(self) -> ModelConstants:
        """The constants of the loaded model."""
        return self._started.model.constants

    @property
    def memory_used_bytes(self) -> int:
        """The device memory in use at the latest cleanup."""
        return self._started.memory_used_bytes

    def attach(self, slot: int, on_event: Callable[[Event], None]) -> SlotChannel:
        """Open the channel to a slot. Units may be queued before the conversation is open."""
        inbox = Inbox(self.constants.count_of(self._inbox_unit_count))
        channel = SlotChannel(slot, inbox, on_event)
        with self._lock:
            if slot in self._channels:
                raise ValueError(f"slot {slot} is in use")
            self._channels[slot] = channel
        return channel

    @property
    def _preparer(self) -> Preparer:
        return self._started.preparer

    async def prepare_conversation(
        self, channel: SlotChannel, options: ConversationOptions
    ) -> PreparedConversation:
        """Lay out the prompt and compute the voice of a conversation in a thread.

        Raises OptionError.
        """
        lay_out = partial(self._preparer.conversation, options)
        return await channel.preparation.run(self._pools.voices, lay_out)

    async def prepare_unit(
        self, channel: SlotChannel, record: UnitRecord
    ) -> UnitRecord | FailedUnit:
        """Prepare a unit: in a thread if it has pictures or texts to speak, else at once."""
        if not (record.unit.frames or record.unit.speech):
            return prepare_unit(self._preparer, record)
        pool = self._pools.frames
        return await prepare_pictures(self._preparer, record, channel.preparation, pool)

    def prepare_picture(
        self, channel: SlotChannel, picture: Image, max_slices: int | None
    ) -> PreparedPicture:
        """Prepare a picture of a chat's video in any thread. Raises ImageError, AbandonedError."""
        channel.preparation.check()
        return self._preparer.picture(picture, max_slices)

    async def prepare_chat(self, channel: SlotChannel, request: ChatRequest) -> PreparedChat:
        """Check a chat and lay out its prompt in a thread. Raises OptionError.

        When the channel is closed, the work stops before its next picture or sound.
        """
        check = channel.preparation.check
        lay_out = partial(self._preparer.chat, request, check)
        return await channel.preparation.run(self._pools.chats, lay_out)

    def open(self, channel: SlotChannel, conversation: PreparedConversation) -> None:
        """Open a conversation. The event Opened or Lost follows."""
        self._begin(channel, Open(channel.slot, conversation))

    def open_chat(self, channel: SlotChannel, chat: PreparedChat, credit: int) -> None:
        """Open a chat. The event ChatStep follows after every step, or Lost after a failure.

        At most `credit` steps run without a call of `return_credit`. So the chat of a client that
        does not read waits, and does not use the device.
        """
        with self._lock:
            channel.credit = credit
        self._begin(channel, StartChat(channel.slot, chat))

    def _begin(self, channel: SlotChannel, item: Open | StartChat) -> None:
        with self._lock:
            channel.next = item
            channel.since = next(self._numbers)
            self._lock.notify()

    def return_credit(self, channel: SlotChannel) -> None:
        """Allow one more step of a chat, after the output of a step was sent."""
        with self._lock:
            channel.credit += 1
            self._lock.notify()

    def rebuild(
        self, channel: SlotChannel, units: Sequence[PastUnit], *, has_more: bool = False
    ) -> None:
        """Rebuild an open conversation. The event Rebuilt, RebuildRefused or Lost follows.

        Each round first runs the units of other slots, then rebuilds some of `units`. After the
        conversation's last past unit, the speech of the open turn is computed again. `has_more`
        means that a later call brings this last unit.
        """
        with self._lock:
            if channel.rebuild_since is None:
                channel.rebuild_since = next(self._numbers)
            channel.past_units = list(units)
            channel.has_more_past = has_more
            self._lock.notify()

    def put(self, channel: SlotChannel, entry: Entry) -> Entry | None:
        """Queue a unit, or the answer to a refused unit.

        Return the entry that the inbox has dropped to make room; None if there was room.
        """
        if record := entry if isinstance(entry, UnitRecord) else entry.record:
            record.queued_s = time.monotonic()
        with self._lock:
            dropped = channel.inbox.put(entry)
            self._lock.notify()
        return dropped

    def mute(self, channel: SlotChannel) -> None:
        """Drop the queued units and run no further unit. A running unit may still post events."""
        with self._lock:
            channel.is_muted = True
            channel.is_ready = False
            channel.inbox.clear()
            channel.past_units = None

    async def close(self, channel: SlotChannel) -> bool:
        """Clean and check the slot, between two rounds. Return True if it may be leased again.

        The cleanup begins when no preparation for the slot runs any more.
        """
        self.mute(channel)
        await channel.preparation.end()
        is_clean: asyncio.Future[bool] = self._loop.create_future()
        with self._lock:
            self._closing.append((channel, is_clean))
            self._lock.notify()
        return await is_clean

    async def close_again(self, slot: int) -> bool:
        """Repeat what `close` does, for a broken slot that no call holds."""
        return await self.close(self.attach(slot, _ignore))

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
            self._call(self._resolve, self._ended, None)
            return
        self._runner = runner
        self._call(self._resolve, self._loaded, None)
        try:
            while not self._is_stopping:
                self._run_round(runner)
        except Exception as error:  # noqa: BLE001 - the root of a thread; `watch` raises it again
            self._call(self._resolve, self._ended, error)
        else:
            self._call(self._resolve, self._ended, None)

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
            self._busy_since_s = time.monotonic()
            runner.advance(launch)
            with self._lock:
                launch = next(chosen.launches, None)
        self._busy_since_s = None

    def _close_slots(self, runner: ModelRunner) -> None:
        """Clean the slots whose channels are closed."""
        while self._closing:  # only this thread removes entries
            channel, resolved = self._closing.popleft()
            self._busy_since_s = time.monotonic()
            is_clean = runner.close(channel.slot)
            with self._lock:
                del self._channels[channel.slot]
            self._call(self._resolve, resolved, is_clean)
        self._busy_since_s = None

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


def _ignore(event: Event) -> None:
    """Ignore an event: nobody uses the slot."""
