"""The messages between a worker and its engine process: plain data without tensors of the device.

Beside these, the engine process sends lists of `LaunchRecord`, and its log records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from duplane.worker.engine.events import Event
from duplane.worker.models.interface import DeviceDescription, ModelConstants
from duplane.worker.settings import WorkerSettings

# To the engine process.


@dataclass(frozen=True)
class Start:
    """Load the model of these settings. The answer is Loaded or Ended."""

    settings: WorkerSettings


@dataclass(frozen=True)
class Attach:
    slot: int


@dataclass(frozen=True)
class Call:
    """Call a method of `Engine` with the slot's channel and these named arguments."""

    slot: int
    method: Literal["begin", "return_credit", "rebuild", "put", "mute"]
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Close:
    """Clean the slot. The answer is Closed, and no event of the slot follows it."""

    slot: int


# From the engine process.


@dataclass(frozen=True)
class Loaded:
    constants: ModelConstants
    description: DeviceDescription
    memory_used_bytes: int


@dataclass(frozen=True)
class Posted:
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
class Ended:
    """The model cannot be loaded, or has ended with an error. No other message follows.

    `is_refused`: it cannot be loaded because of the checkpoint or the device.
    """

    message: str
    is_refused: bool = False
