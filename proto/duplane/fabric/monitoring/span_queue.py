"""The bounded queue of spans that wait for export, and counts of exported and lost spans."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric

from duplane.fabric.monitoring.metrics import Observed
from duplane.fabric.monitoring.otlp import EXIT_TIMEOUT_S
from duplane.fabric.process import StartError

_log = logging.getLogger(__name__)

_DEFAULT_CAPACITY = 16_384  # enough for about 10 s of 1000 units per second
_MAX_QUEUE_SIZE = "OTEL_BSP_MAX_QUEUE_SIZE"
OUTCOMES = ("exported", "failed", "dropped")
_CANCEL_TIMEOUT_S = 0.5  # for the end of an export that is cancelled


class SpanQueue(BatchSpanProcessor):
    """Exports spans in batches, in a thread of its own, so that callers never wait.

    If the queue is full, because the collector is slow or gone, new spans are dropped.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        """Read the standard settings `OTEL_BSP_*`. Raises StartError if they are invalid."""
        self._exporter = _CountingExporter(exporter)
        self._capacity = _capacity(os.environ)
        self._accepted_count = 0
        self.dropped_count = 0
        try:
            super().__init__(self._exporter, max_queue_size=self._capacity)
        except ValueError as error:
            raise StartError(f"OTEL_BSP_*: {error}") from None

    @property
    def exported_count(self) -> int:
        """The number of spans that the collector has accepted."""
        return self._exporter.exported_count

    @property
    def failed_count(self) -> int:
        """The number of spans that the collector has not accepted, after all attempts."""
        return self._exporter.failed_count

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span. If the queue is full, count the span as dropped."""
        if self._accepted_count - self._exporter.taken_count >= self._capacity:
            self.dropped_count += 1
            return
        if span.context and span.context.trace_flags.sampled:
            self._accepted_count += 1
            super().on_end(span)

    def shutdown(self) -> None:
        """Export the waiting spans within `EXIT_TIMEOUT_S`. The remaining ones count as failed."""
        stopping = threading.Thread(target=super().shutdown, daemon=True)
        stopping.start()
        stopping.join(EXIT_TIMEOUT_S)
        if stopping.is_alive():
            self._exporter.shutdown()  # ends the export that runs, and fails the remaining ones
            stopping.join(_CANCEL_TIMEOUT_S)
        if lost_count := self._accepted_count - self.exported_count + self.dropped_count:
            _log.warning("%d spans were not exported", lost_count)


class _CountingExporter(SpanExporter):
    """Exports spans through another exporter and counts them, in the thread of the queue."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.taken_count = 0
        self.exported_count = 0
        self.failed_count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken_count += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported_count += len(spans)
            else:
                self.failed_count += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _capacity(environ: Mapping[str, str]) -> int:
    text = environ.get(_MAX_QUEUE_SIZE) or str(_DEFAULT_CAPACITY)
    if not text.isdecimal() or not int(text):
        raise StartError(f"{_MAX_QUEUE_SIZE} is {text!r}, must be a number above 0")
    return int(text)


def observe_spans(registry: CollectorRegistry, role: str, queue: SpanQueue | None) -> None:
    """Add the counts of a queue to the metrics of a process. Without a queue the counts are 0."""

    def observe() -> Iterable[Metric]:
        family = CounterMetricFamily(
            "duplane_spans",
            "Spans by outcome: accepted by the collector, refused or lost, or dropped because too"
            " many spans waited.",
            labels=("role", "outcome"),
        )
        counts = (
            (queue.exported_count, queue.failed_count, queue.dropped_count) if queue else (0, 0, 0)
        )
        for outcome, count in zip(OUTCOMES, counts, strict=True):
            family.add_metric((role, outcome), count)
        yield family

    Observed(registry, observe)
