"""Export over OTLP: the standard `OTEL_*` settings, and metrics converted to OTLP messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Literal

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from duplane.fabric.process import StartError

Signal = Literal["TRACES", "METRICS"]

EXIT_TIMEOUT_S = 1.5  # for the last export of each signal, so that a dead collector delays no exit

_UNITS = {"seconds": "s", "bytes": "By"}  # last part of a metric's name -> its unit in OTLP
_DEFAULT_INTERVAL_MS = 60_000  # the default of the standard
_UNKNOWN: Any = None  # for minimum and maximum, which Prometheus does not keep
_CUMULATIVE = AggregationTemporality.CUMULATIVE


def is_export_configured(signal: Signal, environ: Mapping[str, str] = os.environ) -> bool:
    """True if the `OTEL_*` settings ask for an export of this signal (traces or metrics)."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get(f"OTEL_{signal}_EXPORTER", "")
    if exporter:
        return exporter != "none"
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return any(environ.get(name) for name in endpoints)


def check_exporter(signal: Signal, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse every exporter but OTLP over gRPC, the only one that is installed.

    Raises StartError.
    """
    for name, allowed in (
        (f"OTEL_{signal}_EXPORTER", ("", "otlp")),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", ("", "grpc")),
        (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", ("", "grpc")),
    ):
        value = environ.get(name, "")
        if value not in allowed:
            raise StartError(f"{name} is {value!r}, must be {allowed[-1]!r}")


def resource(role: str) -> Resource:
    """Return the description of this process that every export contains."""
    named = os.environ.get("OTEL_SERVICE_NAME")
    return Resource.create({} if named else {SERVICE_NAME: f"duplane-{role}"})


@contextlib.asynccontextmanager
async def exporting(role: str, registry: CollectorRegistry) -> AsyncGenerator[None]:
    """Export the metrics at intervals during the body of the `with`, and at its end.

    Does nothing unless the `OTEL_*` settings ask for an export. Raises StartError if they ask for
    an exporter that is not installed, or are invalid.
    """
    if not is_export_configured("METRICS"):
        yield
        return
    check_exporter("METRICS")
    # Imported only here: most processes export nothing, and the import would slow their start.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    export = _MetricsExport(resource(role), registry, OTLPMetricExporter())
    task = asyncio.create_task(export.run(_interval_s(os.environ)))
    try:
        yield
    finally:
        task.cancel()
        await export.finish()


def _interval_s(environ: Mapping[str, str]) -> float:
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    text = environ.get(name) or str(_DEFAULT_INTERVAL_MS)
    if not text.isdecimal() or not int(text):
        raise StartError(f"{name} is {text!r}, must be milliseconds above 0")
    return int(text) / 1e3


class _MetricsExport:
    """Exports the metrics of one registry.

    The event loop reads the registry; a thread sends the export and waits for the answer. One
    export runs at a time, with the time limit of the exporter. Counts are cumulative, so nothing is
    lost if an export fails and a later one succeeds.
    """

    def __init__(
        self, described: Resource, registry: CollectorRegistry, exporter: MetricExporter
    ) -> None:
        self._resource = described
        self._registry = registry
        self._exporter: Any = exporter  # its types are partly unknown
        self._start_ns = time.time_ns()

    async def run(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self._export()

    async def finish(self) -> None:
        """Export the last values within `EXIT_TIMEOUT_S`, then close the exporter.

        Closing the exporter ends an export that still runs.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._export()
        await asyncio.to_thread(self._exporter.shutdown)

    async def _export(self) -> None:
        families = self._registry.collect()
        metrics = metrics_data(families, self._resource, self._start_ns, time.time_ns())
        await asyncio.to_thread(self._exporter.export, metrics)


def metrics_data(
    families: Iterable[Family], described: Resource, start_ns: int, now_ns: int
) -> MetricsData:
    """Convert Prometheus metrics to OTLP messages, under the same names."""
    metrics = [
        Metric(
            name=f"{family.name}_total" if family.type == "counter" else family.name,
            description=family.documentation,
            unit=_UNITS.get(family.name.rpartition("_")[2], ""),
            data=_points(family, start_ns, now_ns),
        )
        for family in families
        if family.samples
    ]
    scope = ScopeMetrics(InstrumentationScope("duplane"), metrics, schema_url="")
    return MetricsData([ResourceMetrics(described, [scope], schema_url="")])


def _points(family: Family, start_ns: int, now_ns: int) -> Gauge | Histogram | Sum:
    if family.type == "histogram":
        return Histogram(_histograms(family.samples, start_ns, now_ns), _CUMULATIVE)
    points = [
        NumberDataPoint(sample.labels, start_ns, now_ns, sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    if family.type == "counter":
        return Sum(points, _CUMULATIVE, is_monotonic=True)
    return Gauge(points)


def _histograms(samples: Sequence[Sample], start_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    """Return a data point for each combination of a histogram's label values.

    The samples of one combination must be next to each other.
    """
    points: list[HistogramDataPoint] = []
    bounds: list[float] = []
    counts: list[int] = []  # cumulative, as in Prometheus
    for sample in samples:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            counts.append(int(sample.value))
        elif sample.name.endswith("_sum"):
            below = [0, *counts[:-1]]
            points.append(
                HistogramDataPoint(
                    sample.labels,
                    start_ns,
                    now_ns,
                    count=counts[-1],
                    sum=sample.value,
                    bucket_counts=[count - less for count, less in zip(counts, below, strict=True)],
                    explicit_bounds=bounds[:-1],
                    min=_UNKNOWN,
                    max=_UNKNOWN,
                )
            )
            bounds, counts = [], []
    return points
