"""Records of units and of launches, from which metrics and spans are made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from duplane.fabric.v1.trace_pb2 import TraceContext
from duplane.worker.models.types import Unit

_NO_AUDIO = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch of a block of the model, for `size` slots."""

    block: str
    size: int
    seconds: float


@dataclass(slots=True, eq=False)
class UnitRecord:
    """One unit on its way through the worker, and the times of this way.

    - `received_s`, `receive_time_ns`: when the worker received the unit (monotonic, wall clock).
    - `edge_time_ns`: when the edge received the unit (wall clock; 0 if unknown).
    - `trace`: the trace context of the unit.
    - `queued_s`: when the unit joined the inbox.
    - `dropped_count`: how many units of the conversation were dropped before this one.
    - `started_s`, `finished_s`: when the unit's first launch began, and its result was known.
    - `busy_s`: the seconds of its launches until then. Between them it waited.
    - `batch_size`: how many slots were in the launch in which the unit chose its first id.
    - `settle_s`: when the settle of the conversation's previous unit began and ended.
    - `sample_count`: the length of the unit's sound.
    """

    unit: Unit
    received_s: float = 0.0
    receive_time_ns: int = 0
    edge_time_ns: int = 0
    trace: TraceContext | None = None
    queued_s: float = 0.0
    dropped_count: int = 0
    started_s: float = 0.0
    finished_s: float = 0.0
    busy_s: float = 0.0
    batch_size: int = 0
    settle_s: tuple[float, float] = (0.0, 0.0)
    sample_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.sample_count = self.unit.audio.size

    def drop_input(self) -> None:
        """Drop the sound and the pictures: the unit has run, or will not run."""
        self.unit = replace(self.unit, audio=_NO_AUDIO, frames=())

    @property
    def sequence(self) -> int:
        """The client's number of the unit."""
        return self.unit.sequence

    @property
    def waited_s(self) -> float:
        """The seconds between the unit's launches."""
        return max(0.0, self.finished_s - self.started_s - self.busy_s)
