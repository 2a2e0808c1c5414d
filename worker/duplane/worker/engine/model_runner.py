"""Calls the model on the device thread: load, warm up, open, run batches, close.

This code is synchronous and has no threads, queues or sockets. It turns exceptions of the model
into events and results. If the device itself is lost, it raises DeviceLostError.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from duplane.fabric.errors import Reason
from duplane.worker.engine.events import (
    BatchRecord,
    ChatStep,
    Event,
    Lost,
    OpenRefused,
    RebuildRefused,
    failed_unit,
)
from duplane.worker.engine.interfaces import Device, DeviceLostError, PreparedChat
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.warm_up import warm_up
from duplane.worker.models.minicpm_o.types import (
    ConversationOptions,
    OptionError,
    PastUnit,
    Rebuilt,
    Unit,
    UnitFailure,
)

_log = logging.getLogger(__name__)

_NO_BATCH = BatchRecord(0, 0.0)


class ModelRunner:
    """The loaded model, and the checks of its results and of its memory.

    `post(slot, event)` is called as soon as there is an event. `on_batch` is called after each
    batch.
    """

    def __init__(
        self,
        device: Device,
        memory_tolerance_bytes: int,
        post: Callable[[int, Event], None],
        on_batch: Callable[[BatchRecord], None] = lambda _: None,
    ) -> None:
        """Load the model and warm it up. Raises the exceptions of loading."""
        self._device = device
        self._post = post
        self._on_batch = on_batch
        self.model = device.load()
        warm_up(self.model)
        self.memory_used_bytes = device.memory_used_bytes(self.model)
        self._memory_bound_bytes = self.memory_used_bytes + memory_tolerance_bytes
        self._open_slots: set[int] = set()
        self.opening: deque[int] = deque()  # slots whose prompts are not fed yet, oldest first
        self.awaiting_voice: deque[int] = deque()  # slots that wait for `start_turn`, oldest first
        self._last_batches: dict[int, BatchRecord] = {}  # the batch of each slot's last unit

    def open(self, slot: int, options: ConversationOptions) -> None:
        """Begin a conversation. `feed_prompt` feeds its prompt later."""
        self._open_slots.add(slot)
        try:
            self.model.begin(slot, options)
        except OptionError as error:
            self._post(slot, OpenRefused(error))
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends one session
            _log.exception("slot %d: the conversation could not be opened", slot)
            self._on_lost([slot])
        else:
            self.opening.append(slot)

    def feed_prompt(self, row_count: int) -> int | None:
        """Feed at most `row_count` rows of the oldest prompt.

        Return the slot of its conversation if the conversation is now open.
        """
        slot = self.opening[0]
        try:
            opened = self.model.feed_prompt(slot, row_count)
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends one session
            _log.exception("slot %d: the prompt could not be fed", slot)
            self.opening.popleft()
            self._on_lost([slot])
            return None
        if opened is None:
            return None
        self.opening.popleft()
        self._post(slot, opened)
        return slot

    def open_chat(self, slot: int, prepared: PreparedChat) -> bool:
        """Open a chat. Return True if its steps may run."""
        self._open_slots.add(slot)
        try:
            self.model.open_chat(slot, prepared)
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends one session
            _log.exception("slot %d: the chat could not be opened", slot)
            self._on_lost([slot])
            return False
        return True

    def feed_ahead(self, channel: SlotChannel, row_count: int) -> set[int]:
        """Feed some pictures of the unit that a slot has begun; return the slot if this fails."""
        unit, slot = channel.begun, channel.slot
        assert unit is not None, "form_batch has begun it"
        try:
            result = self.model.feed_ahead(unit, row_count)
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends one session
            _log.exception("slot %d: pictures could not be fed", slot)
            channel.begun = None
            self._on_lost([slot])
            return {slot}
        if not isinstance(result, UnitFailure):
            channel.begun_rows = result
            return set()
        channel.begun = None
        self._post(slot, failed_unit(unit, result))
        if not result.is_fatal:
            return set()
        self._check_device()
        return {slot}

    def run_units(self, units: Sequence[Unit]) -> set[int]:
        """Run and settle a batch with one unit per slot. Return the slots that were lost."""
        record = BatchRecord(len(units), time.monotonic())
        waiting: dict[int, Unit] = {}
        for unit in units:
            unit.started_s, unit.batch_size, unit.batch = record.started_s, len(units), record
            last = self._last_batches.get(unit.slot, _NO_BATCH)
            unit.settle_s = last.settle_s, last.ended_s
            self._last_batches[unit.slot] = record
            waiting[unit.slot] = unit
        slots = set(waiting)
        lost: set[int] = set()
        try:
            for result in self.model.step(units):
                unit = waiting.pop(result.slot)
                unit.finished_s = time.monotonic()
                if not isinstance(result, UnitFailure):
                    result.unit.finished_s = unit.finished_s  # the model may have copied the unit
                    self._post(result.slot, result)
                    continue
                self._post(result.slot, failed_unit(unit, result))
                if result.is_fatal:
                    lost.add(result.slot)
            if lost:
                self._check_device()
            if waiting:
                raise RuntimeError(f"the model returned no result for slots {sorted(waiting)}")
            record.settle_s = record.ended_s = time.monotonic()
            for failure in self.model.settle(sorted(slots - lost)):
                lost.add(failure.slot)
                self._on_lost([failure.slot])
            record.ended_s = time.monotonic()
            kept = sorted(slots - lost)
            self.awaiting_voice += [slot for slot in kept if self.model.awaits_voice(slot)]
        except Exception as error:  # noqa: BLE001 - the border to the model: logged, and ends the batch
            self._on_batch_failed(error, slots, lost)
        finally:
            self._on_batch(record)
        return lost

    def start_turn(self) -> set[int]:
        """Start the turn that waits longest for its voice. Return its slot if it was lost."""
        slot = self.awaiting_voice.popleft()
        try:
            self.model.start_turn(slot)
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends one session
            _log.exception("slot %d: the prompt of the voice could not be computed", slot)
            self._on_lost([slot])
            return {slot}
        return set()

    def rebuild(self, slot: int, units: Sequence[PastUnit]) -> Rebuilt | None:
        """Rebuild some past units of a conversation. Return None if the conversation is lost."""
        try:
            result = self.model.rebuild(slot, units)
        except Exception:  # noqa: BLE001 - the border to the model: logged, and ends one session
            _log.exception("slot %d: the conversation could not be rebuilt", slot)
            self._on_lost([slot])
            return None
        if isinstance(result, Rebuilt):
            return result
        _log.error("slot %d: the conversation could not be rebuilt: %s", slot, result.message)
        if result.reason in (Reason.REBUILD_REFUSED, Reason.REBUILD_DIFFERS):
            self._post(slot, RebuildRefused(Reason(result.reason), result.message, result.field))
        else:
            self._on_lost([slot])
        return None

    def run_chats(self, slots: Sequence[int]) -> set[int]:
        """Run one step of several chats together; return the slots whose chats have ended."""
        ended: set[int] = set()
        try:
            for result in self.model.chat_step(slots):
                if isinstance(result, UnitFailure):
                    _log.error("slot %d: a chat failed: %s", result.slot, result.message)
                    ended.add(result.slot)
                    self._on_lost([result.slot])
                    continue
                self._post(result.slot, ChatStep(result, len(slots)))
                if result.finish is not None:
                    ended.add(result.slot)
        except Exception as error:  # noqa: BLE001 - the border to the model: logged, and ends the batch
            self._on_batch_failed(error, slots, ended)
        return ended

    def _on_batch_failed(self, error: Exception, slots: Collection[int], over: set[int]) -> None:
        """Report all slots of a failed batch as lost, because the cache of each may be broken.

        Raises `error` again if it is a DeviceLostError.
        """
        if isinstance(error, DeviceLostError):
            raise error
        _log.exception("a batch of slots %s failed", sorted(slots))
        self._on_lost(set(slots) - over)
        over.update(slots)

    def _on_lost(self, slots: Collection[int]) -> None:
        """Report lost conversations. Raises DeviceLostError if the device itself is lost."""
        for slot in slots:
            self._post(slot, Lost())
        self._check_device()

    def _check_device(self) -> None:
        try:
            self._device.check()
        except Exception as error:
            raise DeviceLostError(f"{type(error).__name__}: {error}") from error

    def close(self, slot: int) -> bool:
        """Clean the slot. Return True if it may be leased again. If False, call again later."""
        self._open_slots.discard(slot)
        for waiting in (self.opening, self.awaiting_voice):
            if slot in waiting:
                waiting.remove(slot)
        self._last_batches.pop(slot, None)
        try:
            self.model.close(slot)
            is_clean = self.model.is_clean(slot)
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
        self.memory_used_bytes = self._device.memory_used_bytes(self.model)
        if self._open_slots or self.memory_used_bytes <= self._memory_bound_bytes:
            return True
        gc.collect()  # tracebacks of failed calls may hold tensors in reference cycles
        self.memory_used_bytes = self._device.memory_used_bytes(self.model)
        if self.memory_used_bytes <= self._memory_bound_bytes:
            return True
        _log.error(
            "slot %d: the device holds %d bytes after its cleanup, %d are allowed",
            *(slot, self.memory_used_bytes, self._memory_bound_bytes),
        )
        return False
