"""The channel between the call that holds a slot and the device thread, for units and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from duplane.worker.engine.events import DroppedUnit, Event, FailedUnit
from duplane.worker.engine.inbox import Entry, Inbox
from duplane.worker.engine.preparation import Preparation
from duplane.worker.engine.schedule import (
    BACKGROUND_DEADLINE_S,
    CHAT_DEADLINE_S,
    CHAT_PERIOD_S,
    UNIT_DEADLINE_S,
    Kind,
    Work,
)
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.chat import ChatOutput
from duplane.worker.models.interface import (
    Continue,
    Item,
    Open,
    Part,
    Rebuild,
    RunUnit,
    StartChat,
    Unfinished,
)
from duplane.worker.models.types import PastUnit, Rebuilt

_ANSWER = (Part.DECODE, Part.TALK, Part.VOCODE)
"""Parts of the answer to a chat; other parts of a chat are of its prompt."""


class Channel:
    """One slot's channel, from `Engine.attach` to `Engine.close`, as its call sees it.

    `on_event` is called on the event loop, in the order of the events. `dropped_count`: how many
    units, and answers to refused units, were dropped.
    """

    def __init__(self, slot: int, on_event: Callable[[Event], None]) -> None:
        self.slot = slot
        self.on_event = on_event
        self.preparation = Preparation()
        self.dropped_count: int = 0


class SlotChannel(Channel):
    """A channel of the device thread, whose lock guards `inbox` and these fields:

    - `is_ready`: the conversation has opened and has not ended. Always false for a chat.
    - `is_muted`: the slot's work must not continue.
    - `is_running`: the slot is in a launch, so it has no other work now.
    - `next`: the item that opens the slot, or the rest of unfinished work; None without either.
    - `since_s`, `moved_s`: when the work that `next` belongs to began, and its last launch ended.
    - `begun`: the unit that runs; None from its answer on.
    - `settle_s`: when the last unit was answered, and when the conversation was free again.
    - `is_chat`; `credit`: how many outputs of the chat may still come; `piece_s`: when the last
      text of its answer came. The first one is due at once.
    - `past_units`: the units that are still to be rebuilt; None if there are none.
    - `has_more_past`: more past units follow these.
    - `rebuild_since_s`: when the conversation's rebuild began; None before.
    """

    def __init__(self, slot: int, inbox: Inbox, on_event: Callable[[Event], None]) -> None:
        super().__init__(slot, on_event)
        self.inbox = inbox
        self.is_ready = False
        self.is_muted = False
        self.is_running = False
        self.next: Open | StartChat | Continue | None = None
        self.since_s = 0.0
        self.moved_s = 0.0
        self.begun: UnitRecord | None = None
        self.settle_s = (0.0, 0.0)
        self.is_chat = False
        self.credit = 0
        self.piece_s = 0.0
        self.past_units: list[PastUnit] | None = None
        self.has_more_past = False
        self.rebuild_since_s: float | None = None

    def begin(self, item: Open | StartChat, credit: int, now_s: float) -> None:
        """Open the slot with this item."""
        self.next = item
        self.is_chat = isinstance(item, StartChat)
        self.credit = credit
        self.since_s = self.moved_s = now_s

    def rebuild(self, units: Sequence[PastUnit], now_s: float, *, has_more: bool) -> None:
        """Rebuild these units when the slot has no other work."""
        if self.rebuild_since_s is None:
            self.rebuild_since_s = now_s
        self.past_units = list(units)
        self.has_more_past = has_more
        self.moved_s = now_s

    def return_credit(self) -> None:
        """Allow one more output of the chat."""
        self.credit += 1

    def put(self, entry: Entry) -> None:
        """Queue a unit, or the answer to a refused unit."""
        if dropped := self.inbox.put(entry):
            self.dropped_count += 1
            self.on_event(DroppedUnit(dropped))

    def mute(self) -> None:
        """Drop the queued units and take no more work."""
        self.is_muted = True
        self.is_ready = False
        self.dropped_count += len(self.inbox.entries)
        self.inbox.entries.clear()
        self.past_units = None

    def answers(self) -> Iterator[FailedUnit]:
        """Take the answers to refused units whose turn has come from the inbox."""
        entries = self.inbox.entries
        while self._is_free and entries and isinstance(answer := entries[0], FailedUnit):
            entries.popleft()
            yield answer

    def work(self) -> Work | None:
        """Return the slot's next piece of work; None if it has none now."""
        item = self.next
        if self.is_muted or self.is_running:
            return None
        if item is None:
            return self._new_work() if self.is_ready else None
        if isinstance(item, Continue) and self.is_chat:
            return self._chat_work(item) if self.credit else None
        if isinstance(item, Continue) and self.begun is not None:
            return _of_unit(item, self.begun)
        return self._background(item, self.since_s)

    def run(self, item: Item, size: int, now_s: float) -> None:
        """Note that a launch of `size` slots runs the slot's work. A new unit leaves the inbox."""
        self.is_running = True
        self.next = None
        if isinstance(item, RunUnit):
            entry = self.inbox.entries.popleft()
            if isinstance(entry, UnitRecord):
                self.begun = entry
                entry.dropped_count = self.dropped_count
                entry.started_s, entry.settle_s, entry.batch_size = now_s, self.settle_s, size
        elif self.begun and isinstance(item, Continue) and item.part is Part.FEED:
            self.begun.batch_size = size

    def leave(self, unfinished: Unfinished, now_s: float) -> None:
        """Note the work that the slot has left."""
        if unfinished.part in (Part.SETTLE, Part.VOICE):
            self.since_s = now_s
        self.next = Continue(self.slot, unfinished.part, unfinished.rows)

    def finish_unit(self, begin_s: float, now_s: float) -> UnitRecord | None:
        """End the unit that runs; return its record. None if no unit runs."""
        record, self.begun = self.begun, None
        if record is not None:
            self.settle_s = now_s, now_s
            record.finished_s = now_s
            record.busy_s += now_s - begin_s
            record.drop_input()
        return record

    def note_rebuilt(self, rebuilt: Rebuilt) -> bool:
        """Keep the past units that are left. Return whether none is left of the message.

        Raises RuntimeError if past units are left and none was rebuilt.
        """
        past = self.past_units
        if past is None:
            return False  # the session has ended meanwhile
        if past and rebuilt.unit_count < 1 and not rebuilt.is_complete:
            count = rebuilt.unit_count
            raise RuntimeError(f"slot {self.slot} has rebuilt {count} of {len(past)} past units")
        rest = past[rebuilt.unit_count :]
        is_over = rebuilt.is_complete or (self.has_more_past and not rest)
        self.past_units = None if is_over else rest
        return is_over

    def note_output(self, output: ChatOutput, now_s: float) -> None:
        """Note an output of a chat; the last one ends the chat."""
        self.credit -= 1
        if output.token_ids or output.text:
            self.piece_s = now_s
        elif not output.audio.size:  # of the prompt
            self.piece_s = now_s - CHAT_PERIOD_S
        if output.finish is not None:
            self.stop()

    def end_run(self, begin_s: float, now_s: float) -> None:
        """Note that the launch has ended."""
        self.is_running = False
        self.moved_s = now_s
        if self.begun is not None:
            self.begun.busy_s += now_s - begin_s
        elif self.next is None and self.settle_s[0]:
            self.settle_s = self.settle_s[0], now_s

    def stop(self) -> None:
        """Take no more work, because the conversation is lost or the chat is over."""
        self.is_ready = False
        self.next = None
        self.begun = None
        self.past_units = None

    @property
    def is_stranded(self) -> bool:
        """Whether the work of the slot has no outcome and cannot continue."""
        is_open = self.is_ready and self.begun is None
        return not (self.is_muted or self.next or is_open)

    @property
    def _is_free(self) -> bool:
        """Whether the conversation is open and does not work."""
        return self.is_ready and self.next is None and not self.is_running

    def _new_work(self) -> Work | None:
        """Return the next work of an open conversation that does not work."""
        if self.past_units is not None:
            item = Rebuild(self.slot, self.past_units)
            return self._background(item, self.rebuild_since_s or 0.0)
        entry = self.inbox.entries[0] if self.inbox.entries else None
        return _of_unit(RunUnit(entry.unit), entry) if isinstance(entry, UnitRecord) else None

    def _chat_work(self, item: Continue) -> Work:
        if item.part not in _ANSWER:
            return self._background(item, self.since_s)
        # The speech of a piece follows its text without a wait.
        due_s = self.piece_s + CHAT_PERIOD_S if item.part is Part.DECODE else 0.0
        return Work(item, Kind.CHAT, self.piece_s + CHAT_DEADLINE_S, due_s)

    def _background(self, item: Item, since_s: float) -> Work:
        deadline_s = self.moved_s + BACKGROUND_DEADLINE_S
        return Work(item, Kind.BACKGROUND, deadline_s, since_s=since_s)


def _of_unit(item: RunUnit | Continue, record: UnitRecord) -> Work:
    return Work(item, Kind.UNIT, record.received_s + UNIT_DEADLINE_S, size=record.unit.rows)
