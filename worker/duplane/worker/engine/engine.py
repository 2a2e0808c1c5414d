"""What the calls of a worker use of the model: the interface of the device thread.

`DeviceThread` runs the model in the worker's own process, `EngineProcess` in a process beside it.
What needs no weights is here: it runs in thread pools of the worker's process.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from duplane.worker.engine.events import Event, FailedUnit, failed_unit
from duplane.worker.engine.inbox import Entry
from duplane.worker.engine.preparation import PoolFullError, ThreadPools
from duplane.worker.engine.slot_channel import Channel
from duplane.worker.engine.unit_record import LaunchRecord, UnitRecord
from duplane.worker.models.chat import ChatRequest
from duplane.worker.models.interface import (
    DeviceDescription,
    DeviceLostError,
    ModelConstants,
    Open,
    PreparedChat,
    PreparedConversation,
    Preparer,
    StartChat,
)
from duplane.worker.models.types import (
    ConversationOptions,
    PastUnit,
    PreparedPicture,
    UnitFailure,
)

if TYPE_CHECKING:  # a base install has no Pillow
    from PIL.Image import Image

JOIN_TIMEOUT_S = 10.0  # longest wait for the end of the model; then the process ends without it
OwnChannel = TypeVar("OwnChannel", bound=Channel)


class Engine(abc.ABC, Generic[OwnChannel]):
    """All methods are for the event loop. A channel belongs to the engine that has attached it.

    `start` sets these attributes:

    - `ended`: done when no model runs any more, with the exception if the model has failed.
    - `constants` of the model; `description` of the device, for operators.
    - `memory_used_bytes`: the device memory in use at the latest cleanup.
    - `busy_since_s`: when the current call into the model began, the older one if there are two,
      by the monotonic clock; None if there is none.
    """

    ended: asyncio.Future[None]
    constants: ModelConstants
    description: DeviceDescription
    memory_used_bytes: int
    busy_since_s: float | None = None
    _preparer: Preparer

    def __init__(self) -> None:
        self._pools = ThreadPools()
        self._has_loaded = False
        self._is_hung = False
        # Called with the launches since the last call: when there is no work, and after a number.
        self.on_launches: Callable[[Sequence[LaunchRecord]], None] = lambda _: None

    async def start(self) -> None:
        """Load the model and warm it up. Raises the exceptions of loading."""
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        await self._load()
        self._has_loaded = True

    async def stop(self) -> None:
        """End the model after its current call."""
        self._pools.stop()
        await self._stop()

    @abc.abstractmethod
    async def _load(self) -> None: ...

    @abc.abstractmethod
    async def _stop(self) -> None: ...

    async def watch(
        self,
        stuck_after_s: float,
        hung_after_s: float,
        on_stuck: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Report calls into the model that take too long, until the model has ended.

        Calls `on_stuck(True)` when a call exceeds `stuck_after_s`, and `on_stuck(False)` when this
        call returns. Raises DeviceLostError if a call exceeds `hung_after_s`. If an exception has
        ended the model, raises this exception.
        """
        is_stuck = False
        interval_s = min(stuck_after_s, hung_after_s) / 4
        while not self.ended.done():
            begin_s = time.monotonic()
            await asyncio.wait({self.ended}, timeout=interval_s)
            if time.monotonic() - begin_s > 2 * interval_s:
                continue  # this process was stopped, and has not read the latest reports yet
            since_s = self.busy_since_s
            busy_s = 0.0 if since_s is None else time.monotonic() - since_s
            if busy_s > hung_after_s:
                self._is_hung = True
                raise DeviceLostError(f"a call into the model has not returned for {busy_s:.0f} s")
            if is_stuck != (busy_s > stuck_after_s):
                is_stuck = not is_stuck
                await on_stuck(is_stuck)
        self.ended.result()

    @abc.abstractmethod
    def attach(self, slot: int, on_event: Callable[[Event], None]) -> OwnChannel:
        """Open the channel to a slot. Units may be queued before the conversation is open."""

    async def prepare_conversation(
        self, channel: OwnChannel, options: ConversationOptions
    ) -> PreparedConversation:
        """Lay out the prompt and compute the voice of a conversation in a thread.

        Raises OptionError.
        """
        lay_out = partial(self._preparer.conversation, options)
        return await channel.preparation.run(self._pools.voices, lay_out)

    async def prepare_unit(
        self, channel: OwnChannel, record: UnitRecord
    ) -> UnitRecord | FailedUnit:
        """Prepare a unit. Return its record, or the answer that refuses the unit.

        A picture or a text to speak takes some milliseconds in a thread; a sound, microseconds.
        """
        unit = record.unit
        try:
            if unit.frames or unit.speech:
                steps = self._preparer.unit_steps(unit)
                prepared = await channel.preparation.run_steps(self._pools.frames, steps)
            else:
                prepared = self._preparer.unit(unit)
        except PoolFullError:
            fault = "too many pictures and texts wait to be prepared"
            prepared = UnitFailure(unit.slot, "PICTURES_WAIT", fault, is_fatal=False)
        if isinstance(prepared, UnitFailure):
            record.drop_input()
            return failed_unit(record, prepared)
        record.unit = prepared
        return record

    def prepare_picture(
        self, channel: OwnChannel, picture: Image, max_slices: int | None
    ) -> PreparedPicture:
        """Prepare a picture of a chat's video in any thread. Raises ImageError, AbandonedError."""
        channel.preparation.check()
        return self._preparer.picture(picture, max_slices)

    async def prepare_chat(self, channel: OwnChannel, request: ChatRequest) -> PreparedChat:
        """Check a chat and lay out its prompt in a thread. Raises OptionError.

        When the channel is closed, the work stops before its next picture or sound.
        """
        check = channel.preparation.check
        lay_out = partial(self._preparer.chat, request, check)
        return await channel.preparation.run(self._pools.chats, lay_out)

    def open(self, channel: OwnChannel, conversation: PreparedConversation) -> None:
        """Open a conversation. The event Opened or Lost follows."""
        self._begin(channel, Open(channel.slot, conversation), 0)

    def open_chat(self, channel: OwnChannel, chat: PreparedChat, credit: int) -> None:
        """Open a chat. The event ChatStep follows with every output, or Lost after a failure.

        At most `credit` outputs come without a call of `return_credit`. So the chat of a client
        that does not read waits, and does not use the device.
        """
        self._begin(channel, StartChat(channel.slot, chat), credit)

    def _begin(self, channel: OwnChannel, item: Open | StartChat, credit: int) -> None:
        self.tell(channel, "begin", item=item, credit=credit, now_s=time.monotonic())

    def return_credit(self, channel: OwnChannel) -> None:
        """Allow one more output of a chat, after an output was sent."""
        self.tell(channel, "return_credit")

    def rebuild(
        self, channel: OwnChannel, units: Sequence[PastUnit], *, has_more: bool = False
    ) -> None:
        """Rebuild an open conversation. The event Rebuilt, RebuildRefused or Lost follows.

        Each launch rebuilds some of `units`; units of other slots run between the launches. After
        the conversation's last past unit, the speech of the open turn is computed again. `has_more`
        means that a later call brings this last unit.
        """
        now_s = time.monotonic()
        self.tell(channel, "rebuild", units=units, has_more=has_more, now_s=now_s)

    def put(self, channel: OwnChannel, entry: Entry) -> None:
        """Queue a unit, or the answer to a refused unit.

        If the inbox has dropped an entry to make room, the event DroppedUnit follows.
        """
        if record := entry if isinstance(entry, UnitRecord) else entry.record:
            record.queued_s = time.monotonic()
        self.tell(channel, "put", entry=entry)

    def mute(self, channel: OwnChannel) -> None:
        """Drop the queued units and run no further unit. A running unit may still post events."""
        self.tell(channel, "mute")

    @abc.abstractmethod
    def tell(self, channel: OwnChannel, method: str, **arguments: object) -> None:
        """Call a method of the slot's `SlotChannel`, where the model runs."""

    async def close(self, channel: OwnChannel) -> bool:
        """Clean and check the slot, between two launches. Return True if it may be leased again.

        The cleanup begins when no preparation for the slot runs any more.
        """
        self.mute(channel)
        await channel.preparation.end()
        return await self._close(channel)

    @abc.abstractmethod
    async def _close(self, channel: OwnChannel) -> bool: ...

    @staticmethod
    def _resolve(future: asyncio.Future[Any], outcome: object) -> None:
        """Set the result or the exception of a future, unless it is done."""
        if future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    async def close_again(self, slot: int) -> bool:
        """Repeat what `close` does, for a broken slot that no call holds."""
        return await self.close(self.attach(slot, lambda _: None))


AnyEngine = Engine[Any]
