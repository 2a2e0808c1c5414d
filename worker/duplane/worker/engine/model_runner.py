"""Calls the model on the threads of the device: load, warm up, advance, close.

This code is synchronous and has no threads, queues or sockets. It turns results and exceptions of
the model into events and into the state of channels. If the device itself is lost, it raises
DeviceLostError.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping
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
from duplane.worker.engine.schedule import Block, Launch
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.engine.warm_up import warm_up
from duplane.worker.models.chat import ChatOutput
from duplane.worker.models.interface import (
    Continue,
    Device,
    DeviceLostError,
    Item,
    Ready,
    Rebuild,
    Result,
    Unfinished,
)
from duplane.worker.models.types import Opened, Rebuilt, UnitFailure, UnitOutput

_log = logging.getLogger(__name__)

_REBUILD_REASONS = (Reason.REBUILD_REFUSED, Reason.REBUILD_DIFFERS)


class ModelRunner:
    """The loaded model, and the checks of its results and of its memory.

    `post(channel, event)` is called as soon as there is an event. `lock` guards the state of
    `channels`. Two lanes may call `advance` at the same time.
    """

    def __init__(
        self,
        device: Device,
        memory_tolerance_bytes: int,
        channels: Mapping[int, SlotChannel],
        post: Callable[[SlotChannel, Event], None],
        lock: threading.Condition,
    ) -> None:
        """Load the model; then call `warm_up`. Raises the exceptions of loading."""
        self._device = device
        self._channels = channels
        self._post = post
        self._lock = lock
        self.preparer, self.model = device.load()
        self._memory_tolerance_bytes = memory_tolerance_bytes
        self._is_suspect = False  # a unit has failed since the last check of the device
        self._open_slots: set[int] = set()

    def warm_up(self) -> None:
        """Warm the model up, and note the memory in use. Raises RuntimeError if it fails."""
        warm_up(self.preparer, self.model)
        self.memory_used_bytes = self._device.memory_used_bytes()
        self._memory_bound_bytes = self.memory_used_bytes + self._memory_tolerance_bytes

    def advance(self, launch: Launch) -> None:
        """Let the model advance the items of a launch, and deliver each result.

        The slots' channels have noted the launch with `run`; after the call, the caller notes its
        end with `end_run`. If the model raises, or its results do not belong to the items, all
        slots of the launch are lost, and no other slot.
        """
        begin_s = time.monotonic()
        if launch.block is Block.OPEN:
            self._open_slots.update(item.slot for item in launch.items)
        over: set[int] = set()  # slots that are reported as lost or ended
        try:
            self._run(launch, begin_s, over)
            if self._is_suspect:
                self._is_suspect = False
                self._check_device()
        except DeviceLostError:
            raise
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends the launch
            names = [f"{_name(item)} of slot {item.slot}" for item in launch.items]
            _log.exception("a call failed: %s", ", ".join(names))
            with self._lock:
                for slot in {item.slot for item in launch.items} - over:
                    self._channels[slot].stop()
                    self._post(self._channels[slot], Lost())
            self._check_device()

    def _run(self, launch: Launch, begin_s: float, over: set[int]) -> None:
        """Deliver the results of a launch.

        Raises the exceptions of the model, and RuntimeError if a result has no item, or if an item
        has neither an outcome nor work left.
        """
        items = {item.slot: item for item in launch.items}
        silent = set(items)
        for result in self.model.advance(launch.items):
            slot = result.slot
            if slot not in items:
                kind = type(result).__name__
                raise RuntimeError(f"slot {slot} has a result, {kind}, but no item")
            with self._lock:
                if self._deliver(launch, items[slot], result, begin_s):
                    over.add(slot)
            silent.discard(slot)
        with self._lock:
            silent.update(slot for slot in items.keys() - over if self._channels[slot].is_stranded)
        if silent:
            raise RuntimeError(f"slots {sorted(silent)} have neither an outcome nor work left")

    def _deliver(self, launch: Launch, item: Item, result: Result, begin_s: float) -> bool:
        """Post the event of a result and change the state of its channel.

        Return True if the slot does no more work.
        """
        channel, now_s = self._channels[result.slot], time.monotonic()
        match result:
            case UnitOutput():
                record = channel.finish_unit(begin_s, now_s)
                if record is None:
                    raise RuntimeError(f"slot {result.slot} has an output, but no unit")
                self._post(channel, AnsweredUnit(record, result))
            case UnitFailure():
                return self._fail(channel, item, result, channel.finish_unit(begin_s, now_s))
            case Unfinished():
                channel.leave(result, now_s)
            case Ready():
                pass
            case Opened():
                channel.is_ready = not channel.is_muted
                self._post(channel, result)
            case Rebuilt():
                if channel.note_rebuilt(result):
                    self._post(channel, result)
            case ChatOutput():
                channel.note_output(result, now_s)
                self._post(channel, ChatStep(result, len(launch.items)))
                return result.finish is not None
            case _:
                assert_never(result)
        return False

    def _fail(
        self, channel: SlotChannel, item: Item, failure: UnitFailure, record: UnitRecord | None
    ) -> bool:
        """Report a failure. Return True if the conversation or chat is lost."""
        is_lost = record is None or failure.is_fatal
        if is_lost:
            channel.stop()
        if record is not None:
            self._is_suspect |= is_lost
            self._post(channel, failed_unit(record, failure))
            return is_lost
        _log.error(
            "slot %d: %s failed: %s, %s", failure.slot, _name(item), failure.reason, failure.message
        )
        if isinstance(item, Rebuild) and failure.reason in _REBUILD_REASONS:
            reason = Reason(failure.reason)
            self._post(channel, RebuildRefused(reason, failure.message, failure.field))
        else:
            self._is_suspect = True
            self._post(channel, Lost())
        return True

    def _check_device(self) -> None:
        try:
            self._device.check()
        except Exception as error:
            raise DeviceLostError(f"{type(error).__name__}: {error}") from error

    def close(self, slot: int) -> bool:
        """Clean the slot. Return True if it may be leased again. If False, call again later."""
        self._open_slots.discard(slot)
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
        bound_bytes = self._memory_bound_bytes
        self.memory_used_bytes = self._device.memory_used_bytes()
        if self._open_slots or self.memory_used_bytes <= bound_bytes:
            return True
        gc.collect()  # tracebacks of failed calls may hold tensors in reference cycles
        self.memory_used_bytes = self._device.memory_used_bytes()
        if self.memory_used_bytes <= bound_bytes:
            return True
        fault = "slot %d: the device holds %d bytes after its cleanup, %d are allowed"
        _log.error(fault, slot, self.memory_used_bytes, bound_bytes)
        return False


def _name(item: Item) -> str:
    """Return the kind of an item, and the part that it continues, for the log."""
    kind = type(item).__name__
    return f"{kind} {item.part.value}" if isinstance(item, Continue) else kind
