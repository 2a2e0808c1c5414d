"""The worker's metrics: slots, sessions, units with their stages, chats, and device memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from prometheus_client.metrics_core import Metric

from duplane.fabric.errors import Reason
from duplane.fabric.journal import LossReason
from duplane.fabric.kinds import KINDS_BY_NAME, kind_name
from duplane.fabric.monitoring.metrics import (
    UNIT_BUCKETS_S,
    Observed,
    counters,
    gauge,
    gauges,
    histograms,
    late_units,
    new_registry,
)
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.admission import Admission, SlotState
from duplane.worker.engine.events import AnsweredUnit
from duplane.worker.engine.schedule import Block
from duplane.worker.engine.unit_record import LaunchRecord
from duplane.worker.models.interface import ModelConstants
from duplane.worker.models.types import SpeechOutcome, SpeechResult
from duplane.worker.session.copies import Copies

ROLE = "worker"


class AttachOutcome(StrEnum):
    """What became of a call that wanted to continue a session."""

    ATTACHED = "attached"
    TAKEN_OVER = "taken_over"
    UNKNOWN = "unknown"
    NOT_READY = "not_ready"
    STALE = "stale"
    SUPERSEDED = "superseded"
    REFUSED = "refused"


OUTCOMES = ("listen", "speech", "failed", "dropped")
STAGES = tuple(
    field.name for field in session_pb2.StageTimes.DESCRIPTOR.fields if field.name != "total"
)
_TOKEN_SUFFIX = "_token_count"
TOKEN_TYPES = tuple(
    field.name.removesuffix(_TOKEN_SUFFIX) for field in session_pb2.TokenCounts.DESCRIPTOR.fields
)
END_REASONS = (
    *(
        name.removeprefix("CLOSE_REASON_").lower()
        for name, number in session_pb2.CloseReason.items()
        if number
    ),
    *(
        reason.lower()
        for reason in (
            *(Reason.INVALID_FIELD, Reason.OUT_OF_ORDER, Reason.OPEN_TIMEOUT, Reason.SLOW_CLIENT),
            *(Reason.DRAINING, Reason.LEASE_STALE, Reason.UNAVAILABLE, Reason.UNKNOWN),
            *(Reason.REBUILD_REFUSED, Reason.REBUILD_DIFFERS),
        )
    ),
)
CLAIM_REFUSALS = (
    *(Reason.LEASE_FORGED, Reason.LEASE_STALE, Reason.LEASE_EXPIRED, Reason.WRONG_WORKER),
    *(Reason.WRONG_EPOCH, Reason.SLOT_OCCUPIED, Reason.KIND_NOT_SERVED, Reason.DRAINING),
    Reason.INVALID_FIELD,
)
BLOCKS = tuple(block.value for block in Block)
_BATCH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_FACTOR_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 2.0, 5.0)
_STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, *UNIT_BUCKETS_S)
_UNIT_TIMES_KEPT = 128


class WorkerMetrics:
    """The metrics of one worker, and the durations of its latest units, for its reports.

    `used_bytes` returns how many of the device's `memory_bytes` are in use.
    """

    def __init__(
        self,
        admission: Admission,
        model: ModelConstants,
        used_bytes: Callable[[], int],
        memory_bytes: int,
        copies: Copies,
    ) -> None:
        self.registry = registry = new_registry(ROLE)
        self.unit_count = 0
        self.latest_unit_times_s = deque[float](maxlen=_UNIT_TIMES_KEPT)
        self._admission = admission
        self._copies = copies
        self._model = model
        self._used_bytes = used_bytes
        self._memory_bytes = memory_bytes
        self._units = counters(
            registry,
            "duplane_units_total",
            "Units by outcome. A dropped unit has waited too long in the inbox.",
            role=(ROLE,),
            outcome=OUTCOMES,
        )
        self._unit_times = histograms(
            registry,
            "duplane_unit_duration_seconds",
            "Time from the receipt of a unit to its delta.",
            role=(ROLE,),
            outcome=("listen", "speech"),
        )
        self._late = late_units(registry, ROLE)
        self._factors = histograms(
            registry,
            "duplane_real_time_factor",
            "Time from a unit's first launch to its delta, divided by the time of its sound.",
            _FACTOR_BUCKETS,
        ).of()
        self._stages = histograms(
            registry,
            "duplane_stage_duration_seconds",
            "Time of each stage of a unit, and of the unit's waits.",
            _STAGE_BUCKETS_S,
            stage=STAGES,
        )
        self._batches = histograms(
            registry,
            "duplane_batch_size",
            "Slots in the launch that chose a unit's first id, or gave an output of a chat.",
            _BATCH_BUCKETS,
            work=("unit", "chat"),
        )
        self._launch_sizes = histograms(
            registry,
            "duplane_launch_size",
            "Slots in one launch of a block of the model.",
            _BATCH_BUCKETS,
            block=BLOCKS,
        )
        self._launch_times = histograms(
            registry,
            "duplane_launch_duration_seconds",
            "Time of one launch of a block of the model.",
            _STAGE_BUCKETS_S,
            block=BLOCKS,
        )
        self._tokens = counters(
            registry, "duplane_tokens_total", "Tokens of units and chats.", type=TOKEN_TYPES
        )
        self._audio = counters(
            registry,
            "duplane_audio_seconds_total",
            "Duration of the sound of all units, and of the speech of the model.",
            direction=("input", "output"),
        )
        self._ends = counters(
            registry,
            "duplane_sessions_ended_total",
            "Sessions and turns of chat that ended.",
            role=(ROLE,),
            kind=tuple(KINDS_BY_NAME),
            reason=END_REASONS,
        )
        self._refusals = counters(
            registry,
            "duplane_claims_refused_total",
            "Claims that were refused.",
            reason=CLAIM_REFUSALS,
        )
        self._speech_ends = counters(
            registry,
            "duplane_speech_requests_total",
            "Requests to speak a text, by their outcome. A forced listen interrupts a request.",
            outcome=tuple(outcome.value for outcome in SpeechOutcome),
        )
        self._chat_pieces = histograms(
            registry,
            "duplane_chat_delta_duration_seconds",
            "Time from one delta of a chat to the next; for the first delta, from the request.",
        ).of()
        self._copies_given_up = counters(
            registry,
            "duplane_copies_given_up_total",
            "Copies of sessions that were given up.",
            why=tuple(LossReason),
        )
        self._attaches = counters(
            registry,
            "duplane_attaches_total",
            "Calls of edges that wanted to continue a session from its copy.",
            outcome=tuple(AttachOutcome),
        )
        Observed(registry, self._observe)

    def unit(
        self, answered: AnsweredUnit, delta: session_pb2.Delta, stages_s: Mapping[str, float]
    ) -> None:
        """Count a unit with its delta. `stages_s` has the whole time under the key `total`."""
        record, output, total_s = answered.record, answered.output, stages_s["total"]
        self.unit_count += 1
        self.latest_unit_times_s.append(total_s)
        outcome = "listen" if output.is_listen else "speech"
        self._units.of(ROLE, outcome).inc()
        self._unit_times.of(ROLE, outcome).observe(total_s)
        if total_s > self._model.unit_s:
            self._late.inc()
        if delta.dropped_unit_count:
            self._units.of(ROLE, "dropped").inc(delta.dropped_unit_count)
        self._batches.of("unit").observe(record.batch_size)
        for stage, seconds in stages_s.items():
            if seconds and stage != "total":
                self._stages.of(stage).observe(seconds)
        self._count_tokens(delta.token_counts)
        if record.sample_count:
            seconds = record.sample_count / self._model.input_hertz
            self._audio.of("input").inc(seconds)
            self._factors.observe((total_s - (record.started_s - record.received_s)) / seconds)
        if output.audio.size:
            self._audio.of("output").inc(output.audio.size / self._model.output_hertz)

    def launches(self, launches: Iterable[LaunchRecord]) -> None:
        """Count launches of the device."""
        for launch in launches:
            self._launch_sizes.of(launch.block).observe(launch.size)
            self._launch_times.of(launch.block).observe(launch.seconds)

    def speech_ended(self, results: Iterable[SpeechResult]) -> None:
        """Count requests to speak that have ended."""
        for result in results:
            self._speech_ends.of(result.outcome.value).inc()

    def copy_given_up(self, reason: LossReason) -> None:
        """Count a copy that was given up."""
        self._copies_given_up.of(reason).inc()

    def attached(self, outcome: AttachOutcome) -> None:
        """Count a call that wanted to continue a session."""
        self._attaches.of(outcome).inc()

    def unit_failed(self) -> None:
        """Count a unit that has no output."""
        self._units.of(ROLE, "failed").inc()

    def chat_delta(self, seconds: float, batch_size: int) -> None:
        """Count a delta of a chat, which came `seconds` after the previous delta."""
        self._chat_pieces.observe(seconds)
        self._batches.of("chat").observe(batch_size)

    def chat_ended(self, counts: session_pb2.TokenCounts) -> None:
        """Count the tokens of a turn of chat."""
        self._count_tokens(counts)

    def ended(self, kind: lease_pb2.SessionKind, reason: str) -> None:
        """Count the end of a session or of a turn of chat."""
        self._ends.of(ROLE, kind_name(kind), reason.lower()).inc()

    def refused(self, reason: Reason) -> None:
        """Count a claim that was refused."""
        self._refusals.of(reason).inc()

    def _count_tokens(self, counts: session_pb2.TokenCounts) -> None:
        for field, count in counts.ListFields():
            self._tokens.of(field.name.removesuffix(_TOKEN_SUFFIX)).inc(count)

    # The methods below compute gauges whenever Prometheus reads the metrics.

    def _observe(self) -> Iterable[Metric]:
        states = Counter((ROLE, slot.state.name.lower()) for slot in self._admission.slots)
        yield gauges(
            "duplane_slots",
            "Slots of this worker.",
            ("role", "state"),
            {(ROLE, state.name.lower()): 0.0 for state in SlotState} | states,
        )
        kinds = Counter(
            (ROLE, kind_name(slot.kind))
            for slot in self._admission.slots
            if slot.state is SlotState.OCCUPIED
        )
        yield gauges(
            "duplane_sessions",
            "Sessions and turns of chat that hold a slot.",
            ("role", "kind"),
            {(ROLE, kind): 0.0 for kind in KINDS_BY_NAME} | kinds,
        )
        yield gauges(
            "duplane_device_memory_bytes",
            "Memory of the device: in use at the latest cleanup, and in total (0 if unknown).",
            ("state",),
            {("used",): self._used_bytes(), ("total",): self._memory_bytes},
        )
        capacity = self._admission.capacity
        yield gauge(
            "duplane_session_capacity",
            "Sessions that this worker takes: its slots, or fewer because of --latency-limit-s.",
            min(capacity.count, float(len(self._admission.slots))),
        )
        yield gauge(
            "duplane_expected_latency_seconds",
            "Expected p99 of the time of speaking units, from the median of the latest 30 s.",
            capacity.expected_s,
        )
        yield gauge(
            "duplane_worker_draining",
            "1 if this worker accepts no new sessions, because it drains or its device is stuck.",
            float(self._admission.is_draining),
        )
        yield gauge(
            "duplane_copies",
            "Copies of sessions that this worker keeps for other edges.",
            float(self._copies.count),
        )
        yield gauge(
            "duplane_copy_bytes",
            "Memory of the copies of sessions.",
            float(self._copies.space.used_bytes),
        )
        yield gauge(
            "duplane_device_stuck",
            "1 while the device has not answered for --stuck-after-s.",
            float(self._admission.is_stuck),
        )
