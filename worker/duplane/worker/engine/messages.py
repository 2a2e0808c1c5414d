"""The messages between a worker and its engine process: plain data without tensors of the device.

Beside these, the engine process sends the record of each batch after its settle, and its log
records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duplane.worker.engine.events import Event
from duplane.worker.engine.inbox import Entry
from duplane.worker.models.interface import DeviceDescription, ModelConstants, Open, StartChat
from duplane.worker.models.types import PastUnit
from duplane.worker.settings import WorkerSettings

# To the engine process. A message with a slot has the effect of a method of `Engine`.


@dataclass(frozen=True)
class Start:
    """Load the model of these settings. The answer is Loaded or NotLoaded."""

    settings: WorkerSettings


@dataclass(frozen=True)
class Attach:
    slot: int


@dataclass(frozen=True)
class Begin:
    slot: int
    item: Open | StartChat
    credit: int


@dataclass(frozen=True)
class Put:
    """A unit, or the answer to a refused unit, with the number that the events name."""

    slot: int
    entry: Entry


@dataclass(frozen=True)
class RebuildUnits:
    slot: int
    units: Sequence[PastUnit]
    has_more: bool


@dataclass(frozen=True)
class ReturnCredit:
    slot: int


@dataclass(frozen=True)
class Mute:
    slot: int


@dataclass(frozen=True)
class Close:
    """Clean the slot. The answer is Closed, and no event of the slot follows it."""

    slot: int


SlotMessage = Attach | Begin | Put | RebuildUnits | ReturnCredit | Mute | Close

# From the engine process.


@dataclass(frozen=True)
class Loaded:
    constants: ModelConstants
    description: DeviceDescription
    memory_used_bytes: int


@dataclass(frozen=True)
class NotLoaded:
    """The model cannot be loaded. `is_refused`: because of the checkpoint or the device."""

    message: str
    is_refused: bool


@dataclass(frozen=True)
class Posted:
    """An event of a slot. The records in it have the unit without its sound and pictures."""

    slot: int
    event: Event


@dataclass(frozen=True)
class Closed:
    slot: int
    is_clean: bool
    memory_used_bytes: int


@dataclass(frozen=True)
class Alive:
    """A sign of life. `busy_since_s`: see `Engine`; the monotonic clock is that of the machine."""

    busy_since_s: float | None


@dataclass(frozen=True)
class Failed:
    """The model has ended with an error. No other message follows."""

    message: str
