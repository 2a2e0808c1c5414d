"""Records of units and of their batches, from which metrics and spans are made."""

from __future__ import annotations

from dataclasses import dataclass

from duplane.fabric.monitoring.spans import SpanIds
from duplane.fabric.v1.trace_pb2 import TraceContext
from duplane.worker.models.types import Unit


@dataclass(slots=True, eq=False)
class BatchRecord:
    """The record of one batch of units, for its span. Times are monotonic.

    `ids` are the ids of the span. They are set when the span of a unit of the batch is exported.
    """

    size: int
    started_s: float
    settle_s: float = 0.0  # when settle began
    ended_s: float = 0.0
    ids: SpanIds | None = None


@dataclass(slots=True, eq=False)
class UnitRecord:
    """One unit on its way through the worker, and the times of this way.

    - `received_s`, `receive_time_ns`: when the worker received the unit (monotonic, wall clock).
    - `edge_time_ns`: when the edge received the unit (wall clock; 0 if unknown).
    - `trace`: the trace context of the unit.
    - `queued_s`: when the unit joined the inbox.
    - `dropped_count`: how many units of the conversation were dropped before this one.
    - `started_s`, `batch`: when the unit's batch began, and the record of the batch; None before.
    - `settle_s`: when the settle of the conversation's previous unit began and ended.
    - `finished_s`: when the result of the unit was known.
    - `number`: the number that `EngineProcess` gives the unit.
    """

    unit: Unit
    received_s: float = 0.0
    receive_time_ns: int = 0
    edge_time_ns: int = 0
    trace: TraceContext | None = None
    queued_s: float = 0.0
    dropped_count: int = 0
    started_s: float = 0.0
    batch: BatchRecord | None = None
    settle_s: tuple[float, float] = (0.0, 0.0)
    finished_s: float = 0.0
    number: int = 0

    @property
    def slot(self) -> int:
        """The slot of the unit's conversation."""
        return self.unit.slot

    @property
    def sequence(self) -> int:
        """The client's number of the unit."""
        return self.unit.sequence
