"""`duplane bench telemetry`: CPU time of metrics and spans for one unit, in edge and worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, generate_latest

from duplane.edge.clock import Moment, Timer
from duplane.edge.metrics import EdgeMetrics, SessionMetrics
from duplane.edge.session.receipt import Receipt
from duplane.edge.spans import SessionSpans
from duplane.fabric.monitoring.span_queue import SpanQueue
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import lease_pb2, session_pb2, trace_pb2
from duplane.tools.bench.report import show
from duplane.tools.metrics_page import registries
from duplane.worker.admission import Admission
from duplane.worker.metrics import STAGES, WorkerMetrics
from duplane.worker.models.minicpm_o.types import Unit, UnitOutput
from duplane.worker.session.unit_reporter import UnitReporter
from duplane.worker.session.unit_spans import UnitSpans

_UNITS = 500  # units in one round; the queue of the span processor holds more spans
_ROUNDS = 9
_UNITS_PER_S = 1000  # the rate of units for which the share of a core is printed
_SECOND = bytes(4 * 24_000)


class _Encoder(SpanExporter):
    """Encodes spans as an exporter would, and discards them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


class _Traces:
    """A tracer. With `is_exported`, spans are batched and encoded; otherwise no spans are made."""

    def __init__(self, *, is_exported: bool) -> None:
        self._queue = SpanQueue(_Encoder()) if is_exported else None
        self.tracer = Telemetry("bench", self._queue)

    def flush(self) -> None:
        """Encode the queued spans."""
        if self._queue:
            self._queue.force_flush()

    def close(self) -> None:
        """End the encoding thread."""
        self.tracer.shutdown()


class _Clock:
    """The time; nothing is scheduled."""

    def now(self) -> Moment:
        return Moment(time.monotonic(), time.time_ns())

    def call_at(self, monotonic_s: float, callback: Callable[[], None]) -> Timer:
        raise NotImplementedError


def _best_us(
    unit: Callable[[int], object], flush: Callable[[], None] = lambda: None, units: int = _UNITS
) -> float:
    """Return the CPU time of this process per unit, in the fastest of several repetitions."""
    best, sequence = float("inf"), 0
    for _ in range(_ROUNDS):
        began_s = time.process_time()
        for _ in range(units):
            unit(sequence)
            sequence += 1
        flush()
        best = min(best, (time.process_time() - began_s) / units)
    return best * 1e6


@dataclass
class _Totals:
    """What a session has dropped and sent so far."""

    dropped_unit_count: int = 0
    speech_byte_count: int = 0


def _edge_metrics_us() -> float:
    totals = _Totals()
    units = SessionMetrics(EdgeMetrics(lambda: (), playback_delay_s=0.2), totals)
    delta = session_pb2.Delta(speech=session_pb2.Speech(text="Hello there", audio=_SECOND))

    def measure(sequence: int) -> None:
        units.sent.append((sequence, float(sequence)))
        delta.sequence = sequence
        totals.speech_byte_count += len(_SECOND)
        units.answered(delta, Moment(sequence + 0.1, sequence * 1_000_000_000))

    return _best_us(measure)


def _edge_spans_us() -> float:
    traces = _Traces(is_exported=True)
    spans = SessionSpans(traces.tracer, "sess_bench", _Clock())
    unit = session_pb2.Unit(audio=_SECOND)
    delta = session_pb2.Delta(speech=session_pb2.Speech(text="Hello there", audio=_SECOND))

    def measure(sequence: int) -> None:
        unit.sequence = delta.sequence = sequence
        now_ns = time.time_ns()
        spans.sending(unit, Receipt(now_ns, now_ns, now_ns, 0.0))
        spans.sent(sequence)
        written = spans.answered(delta, time.time_ns())
        assert written
        written()

    best_us = _best_us(measure, traces.flush)
    traces.close()
    return best_us


def _output() -> UnitOutput:
    return UnitOutput(
        slot=0,
        unit=Unit(0, np.zeros(16_000, np.float32), trace=_trace(), receive_time_ns=1),
        is_listen=False,
        text="Hello there",
        audio=np.zeros(24_000, np.float32),
        end_of_turn=False,
        context_length=100,
        token_ids=(1, 2, 3),
        text_token_count=3,
        audio_token_count=25,
        input_audio_count=25,
        stage_s=dict.fromkeys(STAGES, 0.01),
    )


def _trace() -> trace_pb2.TraceContext:
    return trace_pb2.TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01")


def _worker_metrics() -> WorkerMetrics:
    return WorkerMetrics(Admission("bench", 1, ()), lambda: 0, 0)


def _worker_metrics_us() -> float:
    metrics, output = _worker_metrics(), _output()
    stages_s = {**output.stage_s, "total": 0.1}
    counts = session_pb2.TokenCounts(
        input_audio_token_count=25, output_text_token_count=3, output_audio_token_count=25
    )
    delta = session_pb2.Delta(token_counts=counts)
    return _best_us(lambda _: metrics.unit(output, delta, stages_s))


def _worker_delta_us(*, is_exported: bool) -> float:
    """Return the time to make a unit's delta with its metrics and, if exported, its span."""
    traces = _Traces(is_exported=is_exported)
    claims = lease_pb2.LeaseClaims(session_id="sess_bench")
    unit_spans = UnitSpans(claims, traces.tracer, _trace(), None)
    reporter = UnitReporter(unit_spans, _worker_metrics())
    output = _output()

    def measure(sequence: int) -> None:
        output.unit.sequence = sequence
        reporter.delta(output, 0.1)

    best_us = _best_us(measure, traces.flush)
    traces.close()
    return best_us


def bench_telemetry() -> None:
    """Measure and print."""
    worker_spans_us = _worker_delta_us(is_exported=True) - _worker_delta_us(is_exported=False)
    rows = [
        ("edge", _edge_metrics_us(), _edge_spans_us()),
        ("worker", _worker_metrics_us(), worker_spans_us),
    ]
    show(
        "one unit, us of CPU; metrics are always counted, spans are made only if they are exported",
        ("", "metrics", "spans", "both", f"of a core at {_UNITS_PER_S} units/s"),
        [
            (role, f"{m:.1f}", f"{s:.1f}", f"{m + s:.1f}", f"{(m + s) * _UNITS_PER_S / 1e6:.1%}")
            for role, m, s in rows
        ],
    )
    show(
        "one scrape, ms of the event loop",
        ("", "series", "ms"),
        [_scrape(role, registry) for role, registry in registries().items()],
    )


def _scrape(role: str, registry: CollectorRegistry) -> tuple[str, str, str]:
    series = sum(len(metric.samples) for metric in registry.collect())
    scrape_us = _best_us(lambda _: generate_latest(registry), units=5)
    return role, str(series), f"{scrape_us / 1e3:.1f}"
