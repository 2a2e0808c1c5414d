"""Joins the spans of several processes to units, and computes the stages of each unit."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from duplane.fabric.monitoring import spans

NETWORK = "network"  # between the edge and the worker, in both directions

_MAX_STEPS = 64  # spans of one session that are kept; a chat has several per turn
_STEPS = frozenset(
    (
        *(spans.EDGE_SESSION, spans.EDGE_QUEUE, spans.EDGE_CLAIM, spans.EDGE_OPEN),
        *(
            spans.EDGE_MOVE,
            spans.EDGE_CLOSE,
            spans.SCHEDULER_QUEUE,
            spans.WORKER_SESSION,
            spans.WORKER_OPEN,
        ),
        spans.WORKER_CLEANUP,
    )
)


class UnitStage(NamedTuple):
    """One stage of a unit, in wall-clock nanoseconds; `place` is edge, network or worker."""

    place: str
    name: str
    begin_ns: int
    end_ns: int

    @property
    def lasted_ms(self) -> float:
        """The duration of the stage."""
        return (self.end_ns - self.begin_ns) / 1e6


class Half(NamedTuple):
    """The parts of a unit's span, from the edge or from the worker, that the reports need."""

    begin_ns: int
    end_ns: int
    stages: tuple[tuple[str, int], ...]
    attributes: Mapping[str, Any]
    counts: Mapping[str, Mapping[str, Any]]  # numbers of tokens, by stage


@dataclass(slots=True)
class Unit:
    """One unit, with its spans in the edge and in the worker. One of the two may be missing."""

    trace_id: str
    edge: Half | None = None
    worker: Half | None = None

    @property
    def _halves(self) -> list[Half]:
        """The halves that are there: at least one, the edge's first."""
        return [half for half in (self.edge, self.worker) if half is not None]

    def _attribute(self, name: str, default: Any) -> Any:
        for half in self._halves:
            if name in half.attributes:
                return half.attributes[name]
        return default

    @property
    def session_id(self) -> str:
        """The id of the session; empty if it is unknown."""
        return str(self._attribute(spans.SESSION_ID, ""))

    @property
    def sequence(self) -> int:
        """The unit's number in its session; -1 if the unit was dropped before it had a number."""
        return int(self._attribute(spans.UNIT_SEQUENCE, -1))

    @property
    def outcome(self) -> str:
        """Listen, speech, failed, dropped or unanswered."""
        return str(self._attribute(spans.UNIT_OUTCOME, ""))

    @property
    def decision(self) -> str:
        """Why the model listened or spoke, for people; empty if the spans do not tell it."""
        facts: list[str] = []
        if self._attribute(spans.UNIT_IS_FORCED, False):
            facts.append("had to listen")
        if self._attribute(spans.UNIT_IS_INTERRUPTION, False):
            facts.append("amid its turn")
        if self._attribute(spans.UNIT_IS_REQUESTED, False):
            facts.append("spoke a requested text")
        if (probability := self._attribute(spans.UNIT_LISTEN_PROBABILITY, None)) is not None:
            facts.append(f"listen probability {probability:.4g}")
        return ", ".join(facts)

    @property
    def error(self) -> str:
        """The reason of a failure."""
        return str(self._attribute(spans.ERROR_TYPE, ""))

    @property
    def is_late(self) -> bool:
        """Whether the unit took longer than its second of sound."""
        return bool(self._attribute(spans.UNIT_IS_LATE, False))

    @property
    def move(self) -> str:
        """The move for which a late unit has waited, for people; empty if there was none."""
        return _move_of(self.edge.attributes) if self.edge else ""

    @property
    def batch_size(self) -> int:
        """The number of slots in the launch that chose the first id; 0 if unknown."""
        return int(self._attribute(spans.BATCH_SIZE, 0))

    @property
    def begin_ns(self) -> int:
        """The time at which the unit was received."""
        return self._halves[0].begin_ns

    @property
    def lasted_ms(self) -> float:
        """The duration of the whole unit."""
        whole = self._halves[0]
        return (whole.end_ns - whole.begin_ns) / 1e6

    def stages(self) -> list[UnitStage]:
        """Return all stages in their order, without gaps."""
        if self.edge is None:
            return list(_stages("worker", self.worker)) if self.worker else []
        found: list[UnitStage] = []
        for stage in _stages("edge", self.edge):
            if stage.name == spans.WORKER:
                found += self._worker_stages(stage, self.edge)
            elif stage.name == spans.SEND and self.worker is not None:
                # The worker may receive the unit before the edge records that it was sent.
                end_ns = max(stage.begin_ns, min(stage.end_ns, self.worker.begin_ns))
                found.append(stage._replace(end_ns=end_ns))
            else:
                found.append(stage)
        return found

    def _worker_stages(self, whole: UnitStage, edge: Half) -> Iterator[UnitStage]:
        """Divide the edge's stage `worker` into the network and the stages of the worker."""
        if self.worker is not None:
            begin_ns = min(whole.begin_ns, self.worker.begin_ns)
            yield UnitStage(NETWORK, "there", begin_ns, self.worker.begin_ns)
            yield from _stages("worker", self.worker)
            yield UnitStage(NETWORK, "back", self.worker.end_ns, whole.end_ns)
            return
        begin_ns = whole.begin_ns
        known = _stage_times(edge.attributes)
        for name, lasted_ns in known:
            yield UnitStage("worker", name, begin_ns, begin_ns + lasted_ns)
            begin_ns += lasted_ns
        if known:
            yield UnitStage(NETWORK, "there, back", begin_ns, whole.end_ns)
        else:
            yield UnitStage("worker", "unknown", begin_ns, whole.end_ns)


def _stages(place: str, half: Half) -> Iterator[UnitStage]:
    stages = half.stages or (("unknown", half.begin_ns),)
    ends = (*(begin_ns for _, begin_ns in stages[1:]), half.end_ns)
    for (name, begin_ns), end_ns in zip(stages, ends, strict=True):
        yield UnitStage(place, name, begin_ns, end_ns)


def _stage_times(attributes: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the nanoseconds of the worker's stages, from the attributes of the edge's span.

    The time of the last stage is the worker's whole time minus the times of the other stages.
    """
    times = {name: attributes.get(f"{spans.STAGE_PREFIX}{name}_ms", 0.0) for name in _TIMED}
    rest_ms = attributes.get(f"{spans.STAGE_PREFIX}total_ms", 0.0) - sum(times.values())
    times[spans.DELIVER] = max(0.0, rest_ms)
    return [(name, int(lasted_ms * 1e6)) for name, lasted_ms in times.items() if lasted_ms]


_TIMED = tuple(name for name in spans.WORKER_STAGES if name != spans.SETTLE)  # it is another unit's


def _move_of(attributes: Mapping[str, Any]) -> str:
    """Return a move as "from w0 to w1 (worker_lost), rebuilt in 380.0 ms"; empty without a move."""
    if spans.MOVE_FROM not in attributes:
        return ""
    cause, to = attributes.get(spans.MOVE_CAUSE), attributes.get(spans.MOVE_TO) or "no worker"
    workers = f"from {attributes[spans.MOVE_FROM]} to {to} ({cause})"
    outcome = attributes.get(spans.MOVE_OUTCOME)  # only the span of the attempt has it
    if outcome in ("stayed", "failed"):
        return f"{workers}: {outcome}"
    return f"{workers}, rebuilt in {attributes.get(spans.MOVE_REBUILD_MS, 0.0):.1f} ms"


class Step(NamedTuple):
    """One span of a session. `note` describes a move."""

    name: str
    begin_ns: int
    end_ns: int
    note: str = ""


@dataclass(slots=True)
class Collected:
    """The newest `limit` units and sessions. The oldest are dropped."""

    limit: int
    units: OrderedDict[bytes, Unit] = field(default_factory=OrderedDict[bytes, Unit])
    steps: OrderedDict[str, deque[Step]] = field(default_factory=OrderedDict[str, deque[Step]])
    span_count: int = 0
    dropped_unit_count: int = 0

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Add the spans of one export."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.span_count += 1
                    self._add(span)

    def _add(self, span: Span) -> None:
        if span.name in (spans.EDGE_UNIT, spans.WORKER_UNIT):
            unit = self.units.setdefault(span.trace_id, Unit(span.trace_id.hex()))
            if span.name == spans.EDGE_UNIT:
                unit.edge = _half(span)
            elif unit.worker is None or span.start_time_unix_nano >= unit.worker.begin_ns:
                unit.worker = _half(span)  # of two workers that had the unit, the later one
            self.dropped_unit_count += _shorten(self.units, self.limit)
        elif span.name in _STEPS:
            attributes = _attributes(span.attributes)
            times = span.start_time_unix_nano, span.end_time_unix_nano
            step = Step(span.name, *times, _move_of(attributes))
            session_id = str(attributes.get(spans.SESSION_ID, ""))
            self.steps.setdefault(session_id, deque(maxlen=_MAX_STEPS)).append(step)
            _shorten(self.steps, self.limit)

    def chosen(self, session_id: str = "", sequence: int | None = None) -> list[Unit]:
        """Return the units of this session, with this number, or both; oldest first."""
        return [
            unit
            for unit in self.units.values()
            if (not session_id or unit.session_id == session_id)
            and (sequence is None or unit.sequence == sequence)
        ]

    def steps_of(self, session_id: str) -> Sequence[Step]:
        """Return the spans of a session, in the order of their begin times."""
        return sorted(self.steps.get(session_id, ()), key=lambda step: step.begin_ns)


def _shorten(entries: OrderedDict[Any, Any], limit: int) -> int:
    """Drop the oldest entry if there are too many; return how many were dropped."""
    if len(entries) <= limit:
        return 0
    entries.popitem(last=False)
    return 1


def _half(span: Span) -> Half:
    return Half(
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        tuple((event.name, event.time_unix_nano) for event in span.events),
        _attributes(span.attributes),
        {event.name: _attributes(event.attributes) for event in span.events if event.attributes},
    )


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        if kind := pair.value.WhichOneof("value"):
            found[pair.key] = getattr(pair.value, kind)
    return found
