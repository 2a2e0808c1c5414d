"""The edge's metrics: its sessions, their ends, and their units."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from duplane.edge.clock import Moment
from duplane.edge.close import CloseReason
from duplane.edge.session.effects import EndMove
from duplane.edge.session.move_table import MoveCause, MoveOutcome
from duplane.edge.session.playout import Playout
from duplane.edge.watching.unit_figures import LateUnit, Move, UnitFigures, longest_stage
from duplane.fabric.errors import Reason
from duplane.fabric.journal import Journal, JournalSpace, LossReason
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat
from duplane.fabric.monitoring.metrics import (
    Observed,
    counters,
    gauge,
    gauges,
    histograms,
    late_units,
    new_registry,
)
from duplane.fabric.v1 import session_pb2

ROLE = "edge"
DIALECTS = ("A", "B", "C", "D", "E", "H", "L", "O")
SESSION_STATES = ("waiting", "running")
REFUSALS = (CloseReason.MODE_REFUSED, CloseReason.SERVICE_UNAVAILABLE)
OUTCOMES = ("listen", "speech", "failed", "dropped", "unanswered")
STREAM_ERRORS = (
    *(Reason.INVALID_FIELD, Reason.QUEUE_FULL, Reason.TENANT_QUOTA),
    *(Reason.KIND_NOT_SERVED, Reason.MODEL_NOT_SERVED),
    Reason.TICKET_CANCELLED,
    *(Reason.OPEN_TIMEOUT, Reason.SLOW_CLIENT, Reason.ENGINE_FAILED, Reason.UNAVAILABLE),
    Reason.UNKNOWN,
)
_GAP_BUCKETS_S = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
_ANSWER_BUCKETS_S = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
_RESUME_GAP_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
RESUME_OUTCOMES = (
    *("same_edge", "rebuilt", "attached"),
    *("refused", "expired", "lost", "stale", "busy"),
)
_MAX_SENT = 1024  # maximum number of unanswered units of a session; the newest are kept


class EdgeMetrics:
    """The metrics of one edge.

    `sessions` yields the dialect and the state of each session. `playback_delay_s` is the time for
    which clients buffer speech before they play it.
    """

    def __init__(
        self, sessions: Callable[[], Iterable[tuple[str, str]]], playback_delay_s: float
    ) -> None:
        self.registry = registry = new_registry(ROLE)
        self.playback_delay_s = playback_delay_s
        self.figures = UnitFigures()
        self._sessions = sessions
        units = counters(
            registry,
            "duplane_units_total",
            "Units by outcome; they are dropped in the edge or by their worker.",
            role=(ROLE,),
            outcome=OUTCOMES,
        )
        self.units = {outcome: units.of(ROLE, outcome) for outcome in OUTCOMES}
        unit_times = histograms(
            registry,
            "duplane_unit_duration_seconds",
            "Time from the receipt of a unit's last sound to the events of its delta.",
            role=(ROLE,),
            outcome=("listen", "speech"),
        )
        self.unit_times = {
            outcome: unit_times.of(ROLE, outcome) for outcome in ("listen", "speech")
        }
        self.late = late_units(registry, ROLE)
        self.gaps = histograms(
            registry,
            "duplane_speech_gap_seconds",
            "Time between two deltas of one turn of speech.",
            _GAP_BUCKETS_S,
        ).of()
        self.underruns = counters(
            registry,
            "duplane_playout_underruns_total",
            "Times that a client had nothing to play within a turn of speech.",
        ).of()
        self.stalled = counters(
            registry,
            "duplane_playout_stalled_seconds_total",
            "Time that clients had nothing to play within a turn of speech.",
        ).of()
        self._ends = counters(
            registry,
            "duplane_sessions_ended_total",
            "Sessions that ended.",
            role=(ROLE,),
            dialect=DIALECTS,
            reason=tuple(CloseReason),
        )
        self._refusals = counters(
            registry,
            "duplane_sessions_refused_total",
            "Sessions that were refused before they began: by an operator, or by a limit.",
            reason=REFUSALS,
        )
        self._cut = counters(
            registry,
            "duplane_sessions_cut_total",
            "Sessions that this edge ended because it stops: --drain-s has passed, or a second "
            "signal has come.",
            dialect=DIALECTS,
        )
        self._stream_errors = counters(
            registry,
            "duplane_stream_errors_total",
            "Calls to a scheduler or a worker that failed.",
            reason=STREAM_ERRORS,
        )
        self._moves = counters(
            registry,
            "duplane_moves_total",
            "Attempts of sessions to continue at another worker, by the cause.",
            cause=tuple(MoveCause),
            outcome=tuple(MoveOutcome),
        )
        self._move_times = histograms(
            registry,
            "duplane_move_duration_seconds",
            "Time in which the units of a session waited for its next worker.",
            _GAP_BUCKETS_S,
        ).of()
        self._resumes = counters(
            registry,
            "duplane_resumes_total",
            "Clients that returned to their session: it kept its slot, or got another one, or it "
            "is not theirs.",
            outcome=RESUME_OUTCOMES,
        )
        self._resume_gaps = histograms(
            registry,
            "duplane_resume_gap_seconds",
            "Time that a session had no socket until its client returned.",
            _RESUME_GAP_BUCKETS_S,
        ).of()
        self.resume_times = histograms(
            registry,
            "duplane_resume_seconds",
            "Time from the return of a client to the first new event about a unit.",
            _GAP_BUCKETS_S,
        ).of()
        self._replayed_units = counters(
            registry,
            "duplane_replayed_units_total",
            "Units whose events were sent again to clients that returned.",
        ).of()
        self._segments = counters(
            registry,
            "duplane_speech_segments_total",
            "Pieces of speech that were heard in half duplex sessions.",
            outcome=("turn", "too_short"),
        )
        self.unheard = counters(
            registry,
            "duplane_unheard_chunks_total",
            "Chunks of sound that came while a half duplex session did not hear its client.",
        ).of()
        self.answer_delays = histograms(
            registry,
            "duplane_answer_delay_seconds",
            "Time from the end of a client's speech to the first part of the answer (half duplex).",
            _ANSWER_BUCKETS_S,
        ).of()
        Observed(registry, self._observe)

    def segment_ended(self, *, is_too_short: bool) -> None:
        """Count a piece of speech of a half duplex session."""
        self._segments.of("too_short" if is_too_short else "turn").inc()

    def ended(self, dialect: str, reason: CloseReason) -> None:
        """Count a session that ended."""
        self._ends.of(ROLE, dialect, reason).inc()

    def refused(self, reason: CloseReason) -> None:
        """Count a session that was refused."""
        self._refusals.of(reason).inc()

    def cut(self, dialect: str) -> None:
        """Count a session that the end of this edge ended."""
        self._cut.of(dialect).inc()

    def stream_failed(self, reason: Reason) -> None:
        """Count a call that failed."""
        self._stream_errors.of(reason).inc()

    def moved(self, cause: MoveCause, outcome: MoveOutcome, silent_s: float) -> None:
        """Count an attempt to continue at another worker.

        `silent_s` is the time in which no worker got units.
        """
        self._moves.of(cause, outcome).inc()
        if outcome is MoveOutcome.MOVED:
            self._move_times.observe(silent_s)

    def resumed(self, outcome: str, gap_s: float, unit_count: int) -> None:
        """Count a client that is back after `gap_s`, and the units that it has missed."""
        self._resumes.of(outcome).inc()
        self._resume_gaps.observe(gap_s)
        self._replayed_units.inc(unit_count)

    def resume_refused(self, outcome: str) -> None:
        """Count a client that did not get the session that it named."""
        self._resumes.of(outcome).inc()

    def observe_detached(self, states: Callable[[], Iterable[str]]) -> None:
        """Add a metric of the sessions without a socket; `states` yields the state of each."""

        def observe() -> Iterable[Metric]:
            counts = Counter(states())
            yield gauges(
                "duplane_detached_sessions",
                "Sessions without a socket: a held one keeps its slot, a parked one has none.",
                ("state",),
                {(state,): float(counts[state]) for state in ("held", "parked")},
            )

        Observed(self.registry, observe)

    def observe_journals(
        self,
        space: JournalSpace,
        unmovable: Callable[[], Mapping[LossReason, int]],
        journals: Callable[[], Sequence[Journal]],
    ) -> None:
        """Add metrics of the journals; `unmovable` counts the sessions that lost theirs."""

        def observe() -> Iterable[Metric]:
            used_bytes, count = space.used_bytes, space.given_up_count
            yield gauge(
                "duplane_journal_bytes",
                "Memory of all journals, and of the events that are kept for clients that may "
                "return.",
                used_bytes,
            )
            yield CounterMetricFamily(
                "duplane_journals_given_up",
                "Sessions that can no longer move, because their journal exceeded a bound or their "
                "worker cannot rebuild conversations.",
                count,
            )
            kept = journals()
            yield gauge(
                "duplane_journals_trimmed",
                "Running sessions whose journal has dropped audio and pictures that their context "
                "window no longer needs.",
                sum(one.is_trimmed for one in kept),
            )
            yield gauge(
                "duplane_journals_approximate",
                "Running sessions whose journal keeps fewer contexts than `--journal-windows`, "
                "because of its bound: they can move, but do not continue exactly.",
                sum(one.is_approximate for one in kept),
            )
            counts = unmovable()
            yield gauges(
                "duplane_unmovable_sessions",
                "Running sessions that can no longer move, by the reason: each ends with its "
                "worker.",
                ("reason",),
                {(reason,): float(counts.get(reason, 0)) for reason in LossReason},
            )

        Observed(self.registry, observe)

    def observe_recordings(self, stopped_count: Callable[[], int]) -> None:
        """Add a metric; `stopped_count` returns how many recordings an error of the disk ended."""

        def observe() -> Iterable[Metric]:
            yield CounterMetricFamily(
                "duplane_recordings_stopped",
                "Recordings that ended before their session because of an error of the disk.",
                stopped_count(),
            )

        Observed(self.registry, observe)

    def observe_connections(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Add metrics of connections; `counts` returns how many are open and how many were cut."""

        def observe() -> Iterable[Metric]:
            open_count, cut_count = counts()
            yield gauge("duplane_connections", "Open connections of clients.", open_count)
            yield CounterMetricFamily(
                "duplane_connections_cut", "Connections that were cut by a limit.", cut_count
            )

        Observed(self.registry, observe)

    def observe_tenants(
        self,
        refused_login_count: Callable[[], int],
        session_counts: Callable[[], Mapping[str, int]],
    ) -> None:
        """Add metrics of logins and tenants.

        `session_counts` counts the sessions of each tenant that the file of API keys names, and of
        all others together.
        """

        def observe() -> Iterable[Metric]:
            yield CounterMetricFamily(
                "duplane_logins_refused",
                "Requests with a credential that was refused.",
                refused_login_count(),
            )
            yield gauges(
                "duplane_tenant_sessions",
                "Sessions by tenant. Tenants that --api-keys does not name count as `other`.",
                ("tenant",),
                {(tenant,): float(count) for tenant, count in session_counts().items()},
            )

        Observed(self.registry, observe)

    # The method below computes gauges when the metrics are collected.

    def _observe(self) -> Iterable[Metric]:
        counts = Counter((ROLE, dialect, state) for dialect, state in self._sessions())
        none = {(ROLE, dialect, state): 0.0 for dialect in DIALECTS for state in SESSION_STATES}
        yield gauges(
            "duplane_sessions",
            "Sessions by state. A running session has a slot; a running chat runs a turn.",
            ("role", "dialect", "state"),
            none | counts,
        )


class SessionMetrics:
    """Adds the units of one duplex session to the metrics of its edge.

    For each sent unit, the caller appends to `sent` its sequence number and the monotonic times at
    which it was received and sent. `worker_id` is the worker that answers.
    """

    def __init__(self, metrics: EdgeMetrics, session_id: str) -> None:
        self.sent = deque[tuple[int, float, float]](maxlen=_MAX_SENT)
        self.worker_id = ""
        self._metrics = metrics
        self._session_id = session_id
        self._last_move_s = 0.0, 0.0  # monotonic times of its begin and its end
        self._playout = Playout(metrics.playback_delay_s)
        self._model = DEFAULT_FORMAT

    def use_model(self, model: ModelFormat) -> None:
        """Measure the units of this model from now on."""
        self._model = model

    def moved(self, end: EndMove, now: Moment) -> None:
        """Count the end of an attempt to move."""
        self._metrics.moved(end.cause, end.outcome, end.silent_s)
        if end.outcome is MoveOutcome.MOVED:
            self._last_move_s = now.monotonic_s - end.silent_s, now.monotonic_s
        self._metrics.figures.moved(
            Move(
                self._session_id,
                now.wall_s,
                end.from_worker_id,
                end.to_worker_id,
                end.cause,
                end.outcome,
                round(end.silent_s * 1e3, 1),
            )
        )

    def answered(self, outcome: session_pb2.Delta | session_pb2.Failed, now: Moment) -> None:
        """Count a unit whose outcome is rendered. Older units without an outcome were dropped."""
        metrics = self._metrics
        received_s = sent_s = now.monotonic_s
        while self.sent and self.sent[0][0] <= outcome.sequence:
            sequence, received_s, sent_s = self.sent.popleft()
            if sequence < outcome.sequence:
                metrics.units["dropped"].inc()
        if isinstance(outcome, session_pb2.Failed):
            metrics.units["failed"].inc()
            return
        is_speech = outcome.HasField("speech")
        name = "speech" if is_speech else "listen"
        taken_s = now.monotonic_s - received_s
        metrics.units[name].inc()
        metrics.unit_times[name].observe(taken_s)
        is_late = taken_s > self._model.unit_s
        metrics.figures.answered(taken_s, now.wall_s, is_late=is_late)
        if is_late:
            metrics.late.inc()
            self._note_late(outcome, received_s, sent_s, now)
        if is_speech and (audio_s := self._model.speech_s(outcome.speech)):
            gap_s, stalled_s = self._playout.add(audio_s, now.monotonic_s)
            if gap_s is not None:
                metrics.gaps.observe(gap_s)
            if stalled_s:
                metrics.underruns.inc()
                metrics.stalled.inc(stalled_s)
        if outcome.end_of_turn or not is_speech:
            self._playout.end_turn()

    def _note_late(
        self, delta: session_pb2.Delta, received_s: float, sent_s: float, now: Moment
    ) -> None:
        """Keep a late unit, with the stage that took the longest."""
        taken_s, (began_s, ended_s) = now.monotonic_s - received_s, self._last_move_s
        # Before the move, the unit was sent to the worker that is lost now.
        move_s = max(0.0, min(now.monotonic_s, ended_s) - max(sent_s, began_s))
        stage, stage_s = longest_stage(taken_s, sent_s - received_s, move_s, delta.stage_times)
        self._metrics.figures.late(
            LateUnit(
                self._session_id,
                self.worker_id,
                delta.sequence,
                now.wall_s,
                round(taken_s * 1e3, 1),
                stage,
                round(stage_s * 1e3, 1),
            )
        )

    def dropped(self, count: int) -> None:
        """Count units that were dropped before they were sent."""
        self._metrics.units["dropped"].inc(count)

    def end(self) -> None:
        """Count the sent units without an outcome."""
        self._metrics.units["unanswered"].inc(len(self.sent))
        self.sent.clear()
