"""The one thread that owns the device, and what is handed to it and back.

The event loop puts commands and units in, the device thread takes them in rounds and posts events
to the loop. Decides when what runs; what running means is in `rounds`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from PIL.Image import Image

from duplane.worker.inbox import Entry, Inbox, Refusal, Unit
from duplane.worker.model.chat_types import ChatRequest
from duplane.worker.model.images import PreparedImage
from duplane.worker.model.types import ConversationOptions, OptionError
from duplane.worker.options import prepare_frames
from duplane.worker.preparation import AbandonedError, Preparation, Threads
from duplane.worker.rounds import ChatStep, Device, Event, Model, PreparedChat, Rounds, Taken

_log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0  # a stuck device thread must not keep the process from ending


class Conversation:
    """One slot's conversation, as the engine's owner holds it.

    `on_event` is called on the event loop, in order, until `close`.
    """

    def __init__(self, slot: int, inbox: Inbox, on_event: Callable[[Event], None]) -> None:
        self.slot = slot
        self.inbox = inbox  # under the engine's lock
        self.on_event = on_event
        self.is_ready = False  # units may be taken; under the engine's lock
        self.credit = 0  # chat outputs that its owner can take now; under the engine's lock
        self.is_closed = False  # nothing more is told; event loop only
        self.preparation = Preparation()


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    conversation: Conversation
    options: ConversationOptions


@dataclass(frozen=True, slots=True, eq=False)
class _OpenChat:
    conversation: Conversation
    prepared: PreparedChat


@dataclass(frozen=True, slots=True, eq=False)
class _Close:
    conversation: Conversation
    is_clean: asyncio.Future[bool]


_Command = _Open | _OpenChat | _Close


class Engine:
    """The device thread and its mailbox. All methods are for the event loop."""

    def __init__(
        self, device: Device, *, memory_tolerance_bytes: int, inbox_unit_count: int
    ) -> None:
        self._device = device
        self._memory_tolerance_bytes = memory_tolerance_bytes
        self._inbox_unit_count = inbox_unit_count
        self._lock = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._conversations: dict[int, Conversation] = {}
        self._is_stopping = False
        self._busy_since_s: float | None = None
        self._rounds: Rounds | None = None
        self._threads = Threads()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    async def start(self) -> None:
        """Start the thread, load the model and warm it up. Raises what loading raises."""
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._loaded

    async def stop(self) -> None:
        """End the thread after the call into the model that it is in."""
        self._threads.stop()
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        if self._rounds is None:
            return  # loading cannot be interrupted, and holds nothing that needs an end
        done, _ = await asyncio.wait({self._ended}, timeout=_JOIN_TIMEOUT_S)
        if not done:
            _log.error("the device thread does not answer; it is left behind")
        elif error := self._ended.exception():
            _log.error("the device thread had failed: %r", error)

    async def watch(
        self, stuck_after_s: float, on_stuck: Callable[[bool], Awaitable[None]]
    ) -> None:
        """Tell when one call into the model lasts longer than `stuck_after_s`, and when it ends.

        Returns when the device thread has ended; raises what ended it, if it was not asked to.
        """
        is_stuck = False
        while not self._ended.done():
            await asyncio.wait({self._ended}, timeout=stuck_after_s / 4)
            busy_s = self._busy_s()
            if is_stuck != (busy_s > stuck_after_s):
                is_stuck = not is_stuck
                await on_stuck(is_stuck)
        self._ended.result()

    def _busy_s(self) -> float:
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def model(self) -> Model:
        """The loaded model; its constants, `prepare` and `prepare_voice` are for other threads."""
        assert self._rounds, "the engine is started"
        return self._rounds.model

    @property
    def memory_used_bytes(self) -> int:
        """Of the device, at the latest cleanup."""
        assert self._rounds, "the engine is started"
        return self._rounds.memory_used_bytes

    def converse(self, slot: int, on_event: Callable[[Event], None]) -> Conversation:
        """Begin a conversation; units may be put before it is open."""
        conversation = Conversation(slot, Inbox(self._inbox_unit_count), on_event)
        with self._lock:
            if slot in self._conversations:
                raise ValueError(f"slot {slot} has a conversation")
            self._conversations[slot] = conversation
        return conversation

    async def prepare(self, conversation: Conversation, options: ConversationOptions) -> None:
        """Do what a conversation's options need of the CPU alone, before it is opened.

        So reading a voice keeps neither the device nor the event loop. A failure is told by
        `open`, which meets it again.
        """
        try:
            read = partial(self.model.prepare_voice, options)
            await conversation.preparation.run(self._threads.voices, read)
        except OptionError:
            pass
        except AbandonedError:
            raise
        except Exception:  # noqa: BLE001 - the model's faults stop here, logged whole
            _log.exception("options could not be prepared")

    async def prepare_unit(self, conversation: Conversation, unit: Unit) -> Unit | Refusal:
        """Decode a unit's frames beside the device; or the answer that says why not."""
        decode = partial(prepare_frames, self.model, unit)
        return await conversation.preparation.run(self._threads.frames, decode)

    def prepare_picture(
        self, conversation: Conversation, picture: Image, max_slices: int | None
    ) -> PreparedImage:
        """Cut a picture of a chat's video, in any thread. Raises ImageError, AbandonedError."""
        conversation.preparation.check()
        return self.model.prepare_picture(picture, max_slices)

    async def prepare_chat(self, conversation: Conversation, wanted: ChatRequest) -> PreparedChat:
        """Check a chat and lay out its prompt beside the device. Raises OptionError.

        It stops between two of its pictures or sounds when the conversation is closed.
        """
        preparation = conversation.preparation
        lay_out = partial(self.model.prepare_chat, wanted, preparation.check)
        return await preparation.run(self._threads.chats, lay_out)

    def open(self, conversation: Conversation, options: ConversationOptions) -> None:
        """Open the conversation; Opened, OpenRefused or Lost follows."""
        with self._lock:
            self._commands.append(_Open(conversation, options))
            self._lock.notify()

    def open_chat(self, conversation: Conversation, prepared: PreparedChat, credit: int) -> None:
        """Begin to answer; a ChatStep follows for every step, or Lost.

        At most `credit` steps are told before they are taken back with `restore`: a chat whose
        client does not read waits, and costs the device nothing.
        """
        with self._lock:
            conversation.credit = credit
            self._commands.append(_OpenChat(conversation, prepared))
            self._lock.notify()

    def restore(self, conversation: Conversation) -> None:
        """One step of a chat was taken: one more may come."""
        with self._lock:
            conversation.credit += 1
            self._lock.notify()

    def put(self, conversation: Conversation, entry: Entry) -> None:
        """Hand in a unit, or the answer owed for a bad one."""
        with self._lock:
            conversation.inbox.put(entry)
            self._lock.notify()

    def silence(self, conversation: Conversation) -> int:
        """Tell nothing more and drop what waits; return how many were dropped in all."""
        conversation.is_closed = True
        with self._lock:
            conversation.is_ready = False
            conversation.inbox.clear()
            return conversation.inbox.dropped_count

    async def close(self, conversation: Conversation) -> bool:
        """Free and verify the slot, between rounds; tell whether it may be leased again.

        What is prepared for the conversation ends first.
        """
        self.silence(conversation)
        await conversation.preparation.end()
        is_clean: asyncio.Future[bool] = self._loop.create_future()
        with self._lock:
            self._commands.append(_Close(conversation, is_clean))
            self._lock.notify()
        return await is_clean

    # Below runs on the device thread.

    def _run(self) -> None:
        try:
            rounds = Rounds(self._device, self._memory_tolerance_bytes, self._post)
        except Exception as error:  # noqa: BLE001 - a thread's root; raised again by `start`
            self._call(self._resolve, self._loaded, error)
            self._call(self._resolve, self._ended, None)
            return
        self._rounds = rounds
        self._call(self._resolve, self._loaded, None)
        try:
            while self._round(rounds):
                pass
        except Exception as error:  # noqa: BLE001 - the thread's root; raised again by `watch`
            self._call(self._resolve, self._ended, error)
        else:
            self._call(self._resolve, self._ended, None)

    def _round(self, rounds: Rounds) -> bool:
        """Do what is ready: commands up to one open, then a unit of each slot that has one, then
        one step of the chats.

        One open per round, so that many newcomers do not make a running conversation wait for all
        of them; one short step of chats, so that a unit waits for no more. Commands keep their
        order, so a slot's close never overtakes its open.
        """
        with self._lock:
            self._lock.wait_for(self._has_work)
            if self._is_stopping:
                return False
            commands = self._take_commands()
        for command in commands:
            self._busy_since_s = time.monotonic()
            self._obey(rounds, command)
        with self._lock:
            batch = self._take_units()
            chats = [c.slot for c in self._conversations.values() if _can_chat(c)]
        if batch:
            self._busy_since_s = time.monotonic()
            self._lose(rounds.run(batch))
        if chats:
            self._busy_since_s = time.monotonic()
            self._lose(rounds.chat(chats))
        self._busy_since_s = None
        return True

    def _has_work(self) -> bool:
        return (
            self._is_stopping
            or bool(self._commands)
            or any(c.is_ready and c.inbox for c in self._conversations.values())
            or any(_can_chat(c) for c in self._conversations.values())
        )

    def _take_commands(self) -> list[_Command]:
        commands: list[_Command] = []
        while self._commands:
            commands.append(self._commands.popleft())
            if not isinstance(commands[-1], _Close):
                break
        return commands

    def _obey(self, rounds: Rounds, command: _Command) -> None:
        conversation = command.conversation
        match command:
            case _Open():
                is_ready = rounds.open(conversation.slot, command.options)
            case _OpenChat():
                is_ready = rounds.open_chat(conversation.slot, command.prepared)
            case _Close():
                is_clean = rounds.close(conversation.slot)
                with self._lock:
                    del self._conversations[conversation.slot]
                self._call(self._resolve, command.is_clean, is_clean)
                return
        with self._lock:
            conversation.is_ready = is_ready and not conversation.is_closed

    def _take_units(self) -> list[Taken]:
        batch: list[Taken] = []
        for conversation in self._conversations.values():
            while conversation.is_ready and (entry := conversation.inbox.take()):
                if isinstance(entry, Refusal):
                    self._call(self._tell, conversation, entry)
                    continue
                dropped_count = conversation.inbox.dropped_count
                batch.append(Taken(conversation.slot, entry, dropped_count))
                break
        return batch

    def _lose(self, slots: set[int]) -> None:
        with self._lock:
            for slot in slots:
                self._conversations[slot].is_ready = False

    def _post(self, slot: int, event: Event) -> None:
        if isinstance(event, ChatStep):
            with self._lock:
                self._conversations[slot].credit -= 1
        self._call(self._tell, self._conversations[slot], event)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _log.warning("the event loop is gone; the device thread told it nothing")

    # Below runs on the event loop again.

    @staticmethod
    def _tell(conversation: Conversation, event: Event) -> None:
        if not conversation.is_closed:
            conversation.on_event(event)

    @staticmethod
    def _resolve(future: asyncio.Future[object], outcome: object) -> None:
        if future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _can_chat(conversation: Conversation) -> bool:
    """Whether a chat may be stepped; other conversations have no credit."""
    return conversation.is_ready and conversation.credit > 0
