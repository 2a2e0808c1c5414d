"""A process publishes its metrics to Prometheus over HTTP."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from support.monitoring.metrics import scrape

from duplane.fabric.monitoring.metrics import counters, new_registry
from duplane.fabric.monitoring.publication import published
from duplane.fabric.process import StartError


async def test_prometheus_reads_the_process_and_its_instruments() -> None:
    registry = new_registry("edge")
    counters(registry, "x_total", "X.", kind=("a", "b")).of("a").inc()
    async with published(registry, "127.0.0.1:0") as url:
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
        published(CollectorRegistry(), "127.0.0.1:0") as url,
        aiohttp.ClientSession() as client,
    ):
        for method, path, status in (("GET", "/", 404), ("POST", "/metrics", 405)):
            async with client.request(method, url.replace("/metrics", path)) as response:
                assert response.status == status


async def test_without_an_address_nothing_is_served() -> None:
    async with published(CollectorRegistry(), "") as url:
        assert url == ""


async def test_address_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"cannot listen on {address}"):
            async with published(CollectorRegistry(), address):
                pass
