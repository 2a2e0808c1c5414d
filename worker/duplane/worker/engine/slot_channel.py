"""The channel between the call that holds a slot and the device thread, for units and events."""

from __future__ import annotations

import abc
from collections.abc import Callable

from duplane.worker.engine.events import Event
from duplane.worker.engine.inbox import Inbox
from duplane.worker.engine.preparation import Preparation
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.interface import Continue, Open, StartChat
from duplane.worker.models.types import PastUnit


class Channel(abc.ABC):
    """One slot's channel, from `Engine.attach` to `Engine.close`, as its call sees it.

    `on_event` is called on the event loop, in the order of the events.
    """

    def __init__(self, slot: int, on_event: Callable[[Event], None]) -> None:
        self.slot = slot
        self.on_event = on_event
        self.preparation = Preparation()

    @property
    @abc.abstractmethod
    def dropped_count(self) -> int:
        """How many units, and answers to refused units, the inbox has dropped."""


class SlotChannel(Channel):
    """A channel of the device thread, whose lock guards `inbox` and these fields:

    - `is_ready`: the conversation has opened and has not ended, so units may run and past units may
      be rebuilt while `next` is None. Always false for a chat.
    - `is_muted`: the slot's work must not continue.
    - `next`: the item that comes before any unit: an item that opens the slot, or the rest of
      unfinished work. None if there is neither.
    - `since`: when the work that `next` belongs to began, as a number that rises.
    - `begun`: the unit whose pictures `next` continues, if it does.
    - `credit`: how many steps of a chat may still run.
    - `past_units`: the units that are still to be rebuilt; None if there are none.
    - `has_more_past`: more past units follow these.
    - `rebuild_since`: when the conversation's rebuild began, as a number that rises; None before.
    """

    def __init__(self, slot: int, inbox: Inbox, on_event: Callable[[Event], None]) -> None:
        super().__init__(slot, on_event)
        self.inbox = inbox
        self.is_ready = False
        self.is_muted = False
        self.next: Open | StartChat | Continue | None = None
        self.since = 0
        self.begun: UnitRecord | None = None
        self.credit = 0
        self.past_units: list[PastUnit] | None = None
        self.has_more_past = False
        self.rebuild_since: int | None = None

    @property
    def dropped_count(self) -> int:
        return self.inbox.dropped_count

    def stop(self) -> None:
        """Take no more work, because the conversation is lost or the chat is over."""
        self.is_ready = False
        self.next = None
        self.begun = None
        self.past_units = None
