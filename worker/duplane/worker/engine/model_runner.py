"""Calls the model on the device thread: load, warm up, advance, close.

This code is synchronous and has no threads, queues or sockets. It turns results and exceptions of
the model into events and into the state of channels. If the device itself is lost, it raises
DeviceLostError.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import assert_never

from duplane.fabric.errors import Reason
from duplane.worker.engine.events import (
    AnsweredUnit,
    ChatStep,
    Event,
    Lost,
    RebuildRefused,
    failed_unit,
)
from duplane.worker.engine.round import Launch
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import BatchRecord
from duplane.worker.engine.warm_up import warm_up
from duplane.worker.models.chat import ChatOutput
from duplane.worker.models.interface import (
    Continue,
    Device,
    DeviceLostError,
    Item,
    Open,
    Part,
    Rebuild,
    Result,
    StartChat,
    Unfinished,
    VoiceReady,
)
from duplane.worker.models.types import Opened, Rebuilt, UnitFailure, UnitOutput

_log = logging.getLogger(__name__)

_NO_BATCH = BatchRecord(0, 0.0)
_REBUILD_REASONS = (Reason.REBUILD_REFUSED, Reason.REBUILD_DIFFERS)


class ModelRunner:
    """The loaded model, and the checks of its results and of its memory.

    `post(channel, event)` is called as soon as there is an event. `on_batch` is called after each
    batch. `lock` guards the state of `channels`.
    """

    def __init__(
        self,
        device: Device,
        memory_tolerance_bytes: int,
        channels: Mapping[int, SlotChannel],
        post: Callable[[SlotChannel, Event], None],
        *,
        on_batch: Callable[[BatchRecord], None] = lambda _: None,
        lock: threading.Condition | None = None,
        numbers: itertools.count[int] | None = None,
    ) -> None:
        """Load the model and warm it up. Raises the exceptions of loading.

        `numbers` are the numbers for `SlotChannel.since`.
        """
        self._device = device
        self._channels = channels
        self._post = post
        self._on_batch = on_batch
        self._lock = lock or threading.Condition()
        self._numbers = numbers or itertools.count(1)
        self.preparer, self.model = device.load()
        warm_up(self.preparer, self.model)
        self.memory_used_bytes = device.memory_used_bytes()
        self._memory_bound_bytes = self.memory_used_bytes + memory_tolerance_bytes
        self._is_suspect = False  # a unit has failed since the last check of the device
        self._open_slots: set[int] = set()
        self._last_batches: dict[int, BatchRecord] = {}  # the batch of each slot's last unit

    def advance(self, launch: Launch) -> None:
        """Let the model advance the items of a launch, and deliver each result.

        If the model raises, or its results do not belong to the items, all slots of the launch are
        lost, and no other slot.
        """
        for item in launch.items.values():
            if isinstance(item, Open | StartChat):
                self._open_slots.add(item.slot)
        batch = self._begin_batch(launch)
        over: set[int] = set()  # slots that are reported as lost or ended
        try:
            self._run(launch, batch, over)
        except DeviceLostError:
            raise
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends the launch
            names = [f"{_name(item)} of slot {slot}" for slot, item in launch.items.items()]
            _log.exception("a call failed: %s", ", ".join(names))
            self._lose(set(launch.items) - over)
        finally:
            if batch:
                self._on_batch(batch)

    def _run(self, launch: Launch, batch: BatchRecord | None, over: set[int]) -> None:
        """Deliver the results of a launch.

        Raises the exceptions of the model, and RuntimeError if a result has no item or an item has
        no result. Only a step of a chat may have none.
        """
        silent = {slot for slot, item in launch.items.items() if not _is_chat_step(item)}
        for result in self.model.advance(tuple(launch.items.values()), launch.row_budget):
            slot = result.slot
            if slot not in launch.items:
                kind = type(result).__name__
                raise RuntimeError(f"slot {slot} has a result, {kind}, but no item")
            if self._deliver(launch, result):
                over.add(slot)
            if slot not in launch.records:
                silent.discard(slot)
            if not launch.records:  # no unit waits for its result
                self._check_suspect()
                if batch and not batch.settle_s:
                    batch.settle_s = time.monotonic()
        if silent:
            raise RuntimeError(f"slots {sorted(silent)} have no result")
        if batch:
            batch.ended_s = time.monotonic()

    def _begin_batch(self, launch: Launch) -> BatchRecord | None:
        """Write the beginning of a batch to the records of its units, if the units run now."""
        records = launch.records
        if not records or launch.feeds_ahead:
            return None
        batch = BatchRecord(len(records), time.monotonic())
        for slot, record in records.items():
            record.started_s, record.batch = batch.started_s, batch
            last = self._last_batches.get(slot, _NO_BATCH)
            record.settle_s = last.settle_s, last.ended_s
            self._last_batches[slot] = batch
        return batch

    def _deliver(self, launch: Launch, result: Result) -> bool:
        """Post the event of a result and change the state of its channel.

        Return True if the slot does no more work.
        """
        channel = self._channels[result.slot]
        match result:
            case UnitOutput():
                record = launch.records.pop(result.slot)
                record.finished_s = time.monotonic()
                self._set_next(channel, None)
                self._post(channel, AnsweredUnit(record, result))
            case UnitFailure():
                return self._fail(launch, channel, result)
            case Unfinished():
                if result.part is Part.PICTURES:
                    launch.records.pop(result.slot)
                self._set_next(channel, result)
            case VoiceReady():
                self._set_next(channel, None)
            case Opened():
                with self._lock:
                    channel.next = None
                    channel.is_ready = True
                self._post(channel, result)
            case Rebuilt():
                self._rebuilt(channel, launch.items[result.slot], result)
            case ChatOutput():
                with self._lock:
                    channel.credit -= 1
                    if result.finish is not None:
                        channel.stop()
                self._post(channel, ChatStep(result, len(launch.items)))
                return result.finish is not None
            case _:
                assert_never(result)
        return False

    def _set_next(self, channel: SlotChannel, unfinished: Unfinished | None) -> None:
        """Note the work that the slot has left, if any."""
        with self._lock:
            if unfinished is None:
                channel.next = None
                channel.begun = None
                return
            if unfinished.part is Part.VOICE:
                channel.since = next(self._numbers)
            channel.next = Continue(channel.slot, unfinished.part, unfinished.rows)

    def _fail(self, launch: Launch, channel: SlotChannel, failure: UnitFailure) -> bool:
        """Report a failure. Return True if the conversation or chat is lost."""
        record = launch.records.pop(failure.slot, None)
        if record is not None:
            record.finished_s = time.monotonic()
            self._is_suspect |= failure.is_fatal
            with self._lock:
                channel.next = None
                channel.begun = None
                if failure.is_fatal:
                    channel.stop()
            self._post(channel, failed_unit(record, failure))
            return failure.is_fatal
        item = launch.items[failure.slot]
        _log.error(
            "slot %d: %s failed: %s, %s", failure.slot, _name(item), failure.reason, failure.message
        )
        is_rebuild = isinstance(item, Rebuild)
        if is_rebuild and failure.reason in _REBUILD_REASONS:
            with self._lock:
                channel.stop()
            refused = RebuildRefused(Reason(failure.reason), failure.message, failure.field)
            self._post(channel, refused)
        else:
            self._lose([failure.slot])
        return True

    def _rebuilt(self, channel: SlotChannel, item: Item, rebuilt: Rebuilt) -> None:
        """Keep the past units that are left. Report the rebuild if none is left of the message.

        Raises RuntimeError if past units are left and none was rebuilt.
        """
        count = len(item.units) if isinstance(item, Rebuild) else 0
        if count and rebuilt.unit_count < 1 and not rebuilt.is_complete:
            raise RuntimeError(
                f"slot {channel.slot} has rebuilt {rebuilt.unit_count} of {count} past units"
            )
        with self._lock:
            if channel.past_units is None:
                return  # the session has ended meanwhile
            rest = channel.past_units[rebuilt.unit_count :]
            is_over = rebuilt.is_complete or (channel.has_more_past and not rest)
            channel.past_units = None if is_over else rest
        if is_over:
            self._post(channel, rebuilt)

    def _lose(self, slots: Collection[int]) -> None:
        """Report lost conversations. Raises DeviceLostError if the device itself is lost."""
        for slot in slots:
            channel = self._channels[slot]
            with self._lock:
                channel.stop()
            self._post(channel, Lost())
        self._check_device()

    def _check_suspect(self) -> None:
        """Check the device if a unit has failed and may have been its victim."""
        if self._is_suspect:
            self._is_suspect = False
            self._check_device()

    def _check_device(self) -> None:
        try:
            self._device.check()
        except Exception as error:
            raise DeviceLostError(f"{type(error).__name__}: {error}") from error

    def close(self, slot: int) -> bool:
        """Clean the slot. Return True if it may be leased again. If False, call again later."""
        self._open_slots.discard(slot)
        self._last_batches.pop(slot, None)
        try:
            self.model.close(slot)
            is_clean = self.model.is_clean(slot)
        except DeviceLostError:
            raise
        except Exception:  # noqa: BLE001 - the border to the model: logged, and breaks one slot
            _log.exception("slot %d: cleanup failed", slot)
            self._check_device()
            return False
        if not is_clean:
            _log.error("slot %d is not clean after its cleanup", slot)
        return is_clean and self._has_memory_back(slot)

    def _has_memory_back(self, slot: int) -> bool:
        """True if the memory in use is within its bound, or if another slot is in use.

        The device reports only the memory of all slots together, so a leak can be found only when
        no other slot is in use.
        """
        self.memory_used_bytes = self._device.memory_used_bytes()
        if self._open_slots or self.memory_used_bytes <= self._memory_bound_bytes:
            return True
        gc.collect()  # tracebacks of failed calls may hold tensors in reference cycles
        self.memory_used_bytes = self._device.memory_used_bytes()
        if self.memory_used_bytes <= self._memory_bound_bytes:
            return True
        _log.error(
            "slot %d: the device holds %d bytes after its cleanup, %d are allowed",
            slot,
            self.memory_used_bytes,
            self._memory_bound_bytes,
        )
        return False


def _is_chat_step(item: Item) -> bool:
    """Return whether an item is a step of a chat, which may have no result."""
    return isinstance(item, Continue) and item.part is Part.CHAT


def _name(item: Item) -> str:
    """Return the kind of an item, and the part that it continues, for the log."""
    kind = type(item).__name__
    return f"{kind} {item.part.value}" if isinstance(item, Continue) else kind
