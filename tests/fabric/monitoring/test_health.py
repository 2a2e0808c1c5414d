"""A process says over HTTP whether it lives, has started and accepts work."""

from __future__ import annotations

import asyncio
import logging
import socket

import aiohttp
import pytest
from support.monitoring.probes import codes, probed, status
from support.time_limits import WITHIN_S

from duplane.fabric.addresses import parse_address
from duplane.fabric.monitoring import health as health_module
from duplane.fabric.monitoring.health import (
    MAX_CONNECTIONS,
    Health,
    health_served,
    reported_health,
)
from duplane.fabric.process import Shutdown, StartError

LISTEN = "127.0.0.1:0"


def of_worker() -> Health:
    return Health("worker", Shutdown())


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = parse_address(url.removeprefix("http://"))
    return await asyncio.open_connection(address.host, address.port)


async def test_probes_follow_the_life_of_a_process() -> None:
    health, is_open, answers = of_worker(), True, True
    async with health_served(health, LISTEN) as url:
        assert await probed(url) == codes(live=True, ready=False, started=False)
        health.start(accepts=lambda: is_open, answers=lambda: answers)
        assert await probed(url) == codes(live=True, ready=True)
        is_open = False
        assert await probed(url) == codes(live=True, ready=False)
        is_open, answers = True, False
        assert await probed(url) == codes(live=False, ready=False)
        answers = True
        assert await probed(url) == codes(live=True, ready=True)
        health.shutdown.drain()
        assert await probed(url) == codes(live=True, ready=False)


async def test_status_has_no_details() -> None:
    health = of_worker()
    health.start()
    async with health_served(health, LISTEN) as url:
        assert await status(url) == {
            "role": "worker",
            "live": True,
            "started": True,
            "ready": True,
            "draining": False,
        }
        health.shutdown.drain()
        assert {"ready": False, "draining": True}.items() <= (await status(url)).items()


async def test_only_probes_are_served() -> None:
    async with health_served(of_worker(), LISTEN) as url, aiohttp.ClientSession() as client:
        for method, path, code in (
            ("GET", "/", 404),
            ("GET", "/metrics", 404),
            ("GET", "/livez/", 404),
            ("HEAD", "/livez", 200),
            ("POST", "/livez", 405),
            ("DELETE", "/status", 405),
        ):
            async with client.request(method, url + path) as response:
                assert (method, path, response.status) == (method, path, code)
                assert response.headers["Connection"] == "close"
                assert response.headers["Cache-Control"] == "no-store"


async def test_bytes_that_are_no_request_are_refused_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(WITHIN_S), health_served(of_worker(), LISTEN) as url:
        for request in (b"\x16\x03\x01\x02\r\n\r\n", b"GET /" + b"a" * 20_000):
            reader, writer = await opened(url)
            writer.write(request)
            assert b" 400 " in (await reader.read()).splitlines()[0]
            writer.close()
        assert await probed(url) == codes(live=True, ready=False, started=False)
    assert not caplog.records


async def test_connections_that_are_held_open_keep_no_probe_out() -> None:
    async with asyncio.timeout(WITHIN_S), health_served(of_worker(), LISTEN) as url:
        held = [await opened(url) for _ in range(MAX_CONNECTIONS)]
        assert await probed(url) == codes(live=True, ready=False, started=False)
        oldest, _ = held[0]
        assert await oldest.read() == b""
        newest, writer = held[-1]
        writer.write(b"GET /livez HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await newest.read()).startswith(b"HTTP/1.1 200 ")
        for _, each in held:
            each.close()


async def test_connection_without_a_request_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "CONNECTION_S", 0.01)
    async with asyncio.timeout(WITHIN_S), health_served(of_worker(), LISTEN) as url:
        reader, writer = await opened(url)
        writer.write(b"GET /livez HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_without_an_address_nothing_is_served(caplog: pytest.LogCaptureFixture) -> None:
    async with reported_health("edge", "", Shutdown()) as health:
        assert not health.is_ready
    assert "health at" not in caplog.text


async def test_address_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"cannot listen on {address}"):
            async with health_served(of_worker(), address):
                pass
