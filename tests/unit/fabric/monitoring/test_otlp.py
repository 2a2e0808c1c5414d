"""Export over OTLP: its standard settings, and the conversion of Prometheus metrics to OTLP."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics.export import Gauge, Histogram, Metric, NumberDataPoint, Sum
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry

from duplane.fabric.monitoring.metrics import Observed, counters, gauge, histograms
from duplane.fabric.monitoring.otlp import (
    Signal,
    check_exporter,
    exporting,
    is_export_configured,
    metrics_data,
)
from duplane.fabric.process import StartError

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}


@pytest.mark.parametrize("signal", ["TRACES", "METRICS"])
def test_export_follows_the_standard_settings(signal: Signal) -> None:
    exporter = f"OTEL_{signal}_EXPORTER"
    assert not is_export_configured(signal, {})
    assert is_export_configured(signal, ENDPOINT)
    assert is_export_configured(signal, {f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT": "http://h:1"})
    assert is_export_configured(signal, {exporter: "otlp"})
    assert not is_export_configured(signal, ENDPOINT | {exporter: "none"})
    assert not is_export_configured(signal, ENDPOINT | {"OTEL_SDK_DISABLED": "true"})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("OTEL_METRICS_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf"),
    ],
)
def test_exporter_that_is_not_installed_is_refused_by_name(setting: str, value: str) -> None:
    with pytest.raises(StartError, match=setting):
        check_exporter("METRICS", {setting: value})


@pytest.mark.parametrize("value", ["0", "-1", "soon"])
async def test_interval_that_cannot_be_used_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv(name, value)
    with pytest.raises(StartError, match=name):
        async with exporting("test", CollectorRegistry()):
            pass


def converted(registry: CollectorRegistry) -> dict[str, Metric]:
    exported = metrics_data(registry.collect(), Resource({}), start_ns=1, now_ns=2)
    (of_resource,) = exported.resource_metrics
    (scope,) = of_resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def test_metrics_keep_their_names_values_and_units() -> None:
    registry = CollectorRegistry()
    counters(registry, "x_total", "Things.", kind=("a", "b")).of("a").inc(3)
    Observed(registry, lambda: [gauge("x_bytes", "Size.", 7)])
    metrics = converted(registry)

    things = metrics["x_total"]
    assert things.description == "Things."
    assert isinstance(things.data, Sum)
    assert things.data.is_monotonic
    points = {str(point.attributes): point.value for point in things.data.data_points}
    assert points == {"{'kind': 'a'}": 3, "{'kind': 'b'}": 0}

    size = metrics["x_bytes"]
    assert size.unit == "By"
    assert isinstance(size.data, Gauge)
    (point,) = size.data.data_points
    assert isinstance(point, NumberDataPoint)
    assert (point.value, point.start_time_unix_nano, point.time_unix_nano) == (7, 1, 2)


def test_histogram_has_the_count_of_each_bucket_alone() -> None:
    registry = CollectorRegistry()
    family = histograms(registry, "x_seconds", "Time.", (1, 2), kind=("a", "b"))
    for seconds in (0.5, 1.5, 1.7, 9.0):
        family.of("b").observe(seconds)
    metric = converted(registry)["x_seconds"]
    assert metric.unit == "s"
    assert isinstance(metric.data, Histogram)
    unused, used = metric.data.data_points
    assert (unused.count, unused.bucket_counts) == (0, [0, 0, 0])
    assert used.attributes == {"kind": "b"}
    assert (used.count, used.sum) == (4, pytest.approx(12.7))
    assert (used.bucket_counts, used.explicit_bounds) == ([1, 2, 1], [1.0, 2.0])
