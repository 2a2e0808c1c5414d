"""A process publishes its metrics to Prometheus over HTTP, and to a collector as OTLP over gRPC."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from support.monitoring.metrics import scrape
from support.monitoring.otlp import MetricReceiver

from duplane.fabric.monitoring.metrics import Observed, counters, gauge, histograms, new_registry
from duplane.fabric.monitoring.publication import published
from duplane.fabric.process import StartError


async def test_prometheus_reads_the_process_and_its_instruments() -> None:
    registry = new_registry("edge")
    counters(registry, "x_total", "X.", kind=("a", "b")).of("a").inc()
    async with published("edge", registry, "127.0.0.1:0") as url:
        seen = await scrape(url)
    assert seen.value("x_total", kind="a") == 1
    assert seen.value("x_total", kind="b") == 0
    assert seen.value("process_resident_memory_bytes") > 1e6
    assert seen.value("process_open_fds") > 0
    assert {"role": "edge"}.items() <= dict(
        next(labels for name, labels in seen if name == "duplane_build_info")
    ).items()
    assert not [name for name in seen.names if name.endswith("_created")]


async def test_only_metrics_are_served() -> None:
    async with (
        published("edge", CollectorRegistry(), "127.0.0.1:0") as url,
        aiohttp.ClientSession() as client,
    ):
        for method, path, status in (("GET", "/", 404), ("POST", "/metrics", 405)):
            async with client.request(method, url.replace("/metrics", path)) as response:
                assert response.status == status


async def test_without_an_address_nothing_is_served() -> None:
    async with published("edge", CollectorRegistry(), "") as url:
        assert url == ""


async def test_address_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"cannot listen on {address}"):
            async with published("edge", CollectorRegistry(), address):
                pass


async def test_collector_gets_the_metrics_at_intervals_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = CollectorRegistry()
    count = counters(registry, "x_total", "X.", kind=("a",)).of("a")
    times = histograms(registry, "x_seconds", "X.", (1.0, 2.0)).of()
    Observed(registry, lambda: [gauge("x_bytes", "X.", 5)])
    count.inc(3)
    times.observe(1.5)
    async with MetricReceiver.serving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://{receiver.address}")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
        async with published("edge", registry, ""):
            service, metrics = await receiver.next_export()
        assert service == "duplane-edge"
        (total,) = metrics["x_total"].sum.data_points
        assert (total.as_double, total.attributes[0].value.string_value) == (3, "a")
        assert metrics["x_total"].sum.is_monotonic
        (size,) = metrics["x_bytes"].gauge.data_points
        assert (size.as_double or size.as_int) == 5
        (time,) = metrics["x_seconds"].histogram.data_points
        assert (time.count, list(time.bucket_counts), time.sum) == (1, [0, 1, 0], 1.5)
        assert not time.HasField("min")

        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "3600000")
        while not receiver.received.empty():
            receiver.received.get_nowait()
        async with published("edge", registry, ""):
            count.inc(4)
        _, metrics = await receiver.next_export()
        (total,) = metrics["x_total"].sum.data_points
        assert total.as_double == 7


async def test_collector_that_is_not_there_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "1")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
        registry = new_registry("edge")
        async with published("edge", registry, "127.0.0.1:0") as url:
            for _ in range(3):
                assert (await scrape(url)).value("process_open_fds") > 0
