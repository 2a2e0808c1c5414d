"""The one thread that may use the device, and the queues between it and the event loop.

The event loop queues commands and units. The device thread executes them in rounds and posts
events back. This module decides the order of the work; `model_runner` calls the model.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from PIL.Image import Image

from duplane.worker.engine.batching import form_batch
from duplane.worker.engine.events import BatchRecord, ChatStep, Event, FailedUnit
from duplane.worker.engine.inbox import Entry, Inbox
from duplane.worker.engine.interfaces import Device, DeviceLostError, Model, PreparedChat
from duplane.worker.engine.model_runner import ModelRunner
from duplane.worker.engine.preparation import AbandonedError, ThreadPools, decode_frames
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.models.minicpm_o.chat.types import ChatRequest
from duplane.worker.models.minicpm_o.types import (
    ConversationOptions,
    OptionError,
    PastUnit,
    PreparedImage,
    Unit,
)

_log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0  # longest wait for the end of the thread; then the process ends without it


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    channel: SlotChannel
    open: Callable[[ModelRunner], bool | None]  # returns True if the slot may run at once


@dataclass(frozen=True, slots=True, eq=False)
class _Close:
    channel: SlotChannel
    is_clean: asyncio.Future[bool]


_Command = _Open | _Close


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
        self._device = device
        self._memory_tolerance_bytes = memory_tolerance_bytes
        self._inbox_unit_count = inbox_unit_count
        self._rows_per_round = rows_per_round
        self._lock = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._channels: dict[int, SlotChannel] = {}
        self._rebuild_numbers = itertools.count(1)
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
    def model(self) -> Model:
        """The loaded model. Other threads may use only its constants and `prepare` methods."""
        assert self._runner, "the device thread is started"
        return self._runner.model

    @property
    def memory_used_bytes(self) -> int:
        """The device memory in use at the latest cleanup."""
        assert self._runner, "the device thread is started"
        return self._runner.memory_used_bytes

    def attach(self, slot: int, on_event: Callable[[Event], None]) -> SlotChannel:
        """Open the channel to a slot. Units may be queued before the conversation is open."""
        channel = SlotChannel(slot, Inbox(self._inbox_unit_count), on_event)
        with self._lock:
            if slot in self._channels:
                raise ValueError(f"slot {slot} is in use")
            self._channels[slot] = channel
        return channel

    async def prepare_options(self, channel: SlotChannel, options: ConversationOptions) -> None:
        """Prepare the voice of a conversation in a thread, before `open`.

        A failure is only logged, because it occurs again in `open`, which reports it.
        """
        try:
            read = partial(self.model.prepare_voice, options)
            await channel.preparation.run(self._pools.voices, read)
        except OptionError:
            pass
        except AbandonedError:
            raise
        except Exception:  # noqa: BLE001 - the border to the model: logged, and `open` reports it
            _log.exception("options could not be prepared")

    async def prepare_unit(self, channel: SlotChannel, unit: Unit) -> Unit | FailedUnit:
        """Decode a unit's frames in a thread."""
        decode = partial(decode_frames, self.model, unit)
        return await channel.preparation.run(self._pools.frames, decode)

    def prepare_picture(
        self, channel: SlotChannel, picture: Image, max_slices: int | None
    ) -> PreparedImage:
        """Slice a picture of a chat's video, in any thread. Raises ImageError, AbandonedError."""
        channel.preparation.check()
        return self.model.prepare_picture(picture, max_slices)

    async def prepare_chat(self, channel: SlotChannel, request: ChatRequest) -> PreparedChat:
        """Check a chat and lay out its prompt in a thread. Raises OptionError.

        When the channel is closed, the work stops before its next picture or sound.
        """
        check = channel.preparation.check
        lay_out = partial(self.model.prepare_chat, request, check)
        return await channel.preparation.run(self._pools.chats, lay_out)

    def open(self, channel: SlotChannel, options: ConversationOptions) -> None:
        """Open a conversation. The event Opened, OpenRefused or Lost follows."""
        self._queue(_Open(channel, lambda runner: runner.open(channel.slot, options)))

    def open_chat(self, channel: SlotChannel, prepared: PreparedChat, credit: int) -> None:
        """Open a chat. The event ChatStep follows after every step, or Lost after a failure.

        At most `credit` steps run without a call of `return_credit`. So the chat of a client that
        does not read waits, and does not use the device.
        """
        with self._lock:
            channel.credit = credit
        self._queue(_Open(channel, lambda runner: runner.open_chat(channel.slot, prepared)))

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
            if not channel.rebuild_number:
                channel.rebuild_number = next(self._rebuild_numbers)
            channel.past_units, channel.has_more_past = list(units), has_more
            self._lock.notify()

    def put(self, channel: SlotChannel, entry: Entry) -> Entry | None:
        """Queue a unit, or the answer to a refused unit.

        Return the entry that the inbox has dropped to make room; None if there was room.
        """
        if unit := entry if isinstance(entry, Unit) else entry.unit:
            unit.queued_s = time.monotonic()
        with self._lock:
            dropped = channel.inbox.put(entry)
            self._lock.notify()
        return dropped

    def mute(self, channel: SlotChannel) -> None:
        """Drop the queued units and run no further unit. A running unit may still post events."""
        with self._lock:
            channel.is_muted, channel.is_ready = True, False
            channel.inbox.clear()
            channel.past_units = None

    async def close(self, channel: SlotChannel) -> bool:
        """Clean and check the slot, between two rounds. Return True if it may be leased again.

        The cleanup begins when no preparation for the slot runs any more.
        """
        self.mute(channel)
        await channel.preparation.end()
        is_clean: asyncio.Future[bool] = self._loop.create_future()
        self._queue(_Close(channel, is_clean))
        return await is_clean

    async def close_again(self, slot: int) -> bool:
        """Repeat what `close` does, for a broken slot that no call holds."""
        return await self.close(self.attach(slot, _ignore))

    def _queue(self, command: _Command) -> None:
        with self._lock:
            self._commands.append(command)
            self._lock.notify()

    # The methods below run on the device thread.

    def _run(self) -> None:
        try:
            runner = ModelRunner(
                self._device, self._memory_tolerance_bytes, self._post, self._post_batch
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
        """Execute commands, then run one batch of units, then one step of the chats.

        Then the round does a part of the work to rebuild one conversation, feeds a part of one
        prompt, and computes one voice. Commands after the first that opens a conversation wait for
        the next round, so that running conversations do not wait for several opens. For the same
        reason, the step of chats and both parts are short. Commands keep their order, so the close
        of a slot never comes before its open. If there is no work, the round waits.
        """
        self._execute_commands(runner)
        with self._lock:
            waiting, row_count = runner.awaiting_voice, runner.model.row_count
            batch = form_batch(self._channels.values(), waiting, row_count, self._rows_per_round)
            has_work = self._commands or runner.opening or waiting or not batch.is_empty
            if not (has_work or self._is_stopping):
                self._busy_since_s = None
                self._lock.wait()
        for channel, failed in batch.failed:
            self._post(channel.slot, failed)
        over: set[int] = set()
        if batch.units:
            self._busy_since_s = time.monotonic()
            over |= runner.run_units(batch.units)
        if batch.ahead:
            self._busy_since_s = time.monotonic()
            over |= runner.feed_ahead(batch.ahead, self._rows_per_round)
        if batch.chat_slots:
            self._busy_since_s = time.monotonic()
            over |= runner.run_chats(batch.chat_slots)
        if batch.rebuilding:
            over |= self._run_rebuild(runner, batch.rebuilding)
        if runner.opening:
            self._feed_prompt(runner)
        if runner.awaiting_voice:
            self._busy_since_s = time.monotonic()
            over |= runner.start_turn()
        self._busy_since_s = None
        for slot in over:
            with self._lock:
                self._channels[slot].is_ready = False

    def _feed_prompt(self, runner: ModelRunner) -> None:
        """Feed a part of the oldest prompt that is not fed yet."""
        self._busy_since_s = time.monotonic()
        opened = runner.feed_prompt(self._rows_per_round)
        if opened is not None:
            with self._lock:
                channel = self._channels[opened]
                channel.is_ready = not channel.is_muted

    def _run_rebuild(self, runner: ModelRunner, channel: SlotChannel) -> set[int]:
        """Rebuild some past units of a conversation; return its slot if the rebuild has failed."""
        units, slot = channel.past_units, channel.slot
        if units is None:  # the session has ended meanwhile
            return set()
        self._busy_since_s = time.monotonic()
        rebuilt = runner.rebuild(slot, units)
        rest = units[rebuilt.unit_count :] if rebuilt else []
        is_over = not rebuilt or rebuilt.is_complete or (channel.has_more_past and not rest)
        with self._lock:
            channel.past_units = None if is_over or channel.is_muted else rest
        if rebuilt and is_over:
            self._post(slot, rebuilt)
        return set() if rebuilt else {slot}

    def _execute_commands(self, runner: ModelRunner) -> None:
        """Execute the queued commands, up to one that opens a conversation or chat."""
        while self._commands:  # only this thread removes commands
            command = self._commands.popleft()
            self._busy_since_s = time.monotonic()
            self._execute(runner, command)
            if isinstance(command, _Open):
                return

    def _execute(self, runner: ModelRunner, command: _Command) -> None:
        channel = command.channel
        if isinstance(command, _Open):
            is_open = command.open(runner) is True
            with self._lock:
                channel.is_ready = is_open and not channel.is_muted
            return
        is_clean = runner.close(channel.slot)
        with self._lock:
            del self._channels[channel.slot]
        self._call(self._resolve, command.is_clean, is_clean)

    def _post(self, slot: int, event: Event) -> None:
        channel = self._channels[slot]
        if isinstance(event, ChatStep):
            with self._lock:
                channel.credit -= 1
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
