"""The channel between the call that holds a slot and the device thread, for units and events."""

from __future__ import annotations

from collections.abc import Callable

from duplane.worker.engine.events import Event
from duplane.worker.engine.inbox import Inbox
from duplane.worker.engine.preparation import Preparation
from duplane.worker.models.minicpm_o.types import PastUnit, Unit


class SlotChannel:
    """One slot's channel, from `DeviceThread.attach` to `DeviceThread.close`.

    `on_event` is called on the event loop, in the order of the events. The device thread's lock
    guards `inbox` and these fields:

    - `is_ready`: the conversation is open and may run.
    - `is_muted`: the conversation must not run any more.
    - `credit`: how many steps of a chat may still run.
    - `past_units`: the units that are still to be rebuilt; None if there are none.
    - `has_more_past`: more past units follow these.
    - `rebuild_number`: 0 before the first past units come; then lower if the rebuild began earlier.

    Only the device thread uses these fields:

    - `begun`: a unit with many pictures, of which some were fed in earlier rounds; or None.
    - `begun_rows`: how many rows of this unit are left.
    """

    def __init__(self, slot: int, inbox: Inbox, on_event: Callable[[Event], None]) -> None:
        self.slot = slot
        self.inbox = inbox
        self.on_event = on_event
        self.preparation = Preparation()
        self.is_ready = False
        self.begun: Unit | None = None
        self.begun_rows = 0
        self.credit = 0
        self.is_muted = False
        self.past_units: list[PastUnit] | None = None
        self.has_more_past = False
        self.rebuild_number = 0
