"""Which addresses other machines can reach, and what must be said to allow that."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from duplane.fabric import exposure
from duplane.fabric.exposure import (
    addresses_beyond_loopback,
    check_fabric_exposure,
    check_metrics_exposure,
    peers_beyond_loopback,
    warned_hourly,
)
from duplane.fabric.process import StartError
from duplane.fabric.tls.settings import FabricTlsSettings

PRIVATE = ["127.0.0.1:0", "127.0.0.2:80", "[::1]:0", "localhost:0", "127.1:0", "2130706433:0"]
OPEN = ["0.0.0.0:0", "[::]:0", "0:0", "10.77.0.1:8010", "[fe80::1]:8010", "no.such.invalid:1"]


@pytest.mark.parametrize("listen", PRIVATE)
async def test_addresses_of_this_machine_only_need_no_flag(listen: str) -> None:
    assert not await addresses_beyond_loopback(listen)
    assert not await check_fabric_exposure(listen, (), FabricTlsSettings())
    await check_metrics_exposure(listen, is_public_allowed=False)


@pytest.mark.parametrize("listen", OPEN)
async def test_addresses_that_others_reach_are_refused_whatever_their_text(listen: str) -> None:
    with pytest.raises(StartError, match=r"--fabric-tls DIR.*--fabric-plaintext"):
        await check_fabric_exposure(listen, (), FabricTlsSettings())
    with pytest.raises(StartError, match="--metrics-public"):
        await check_metrics_exposure(listen, is_public_allowed=False)
    await check_metrics_exposure(listen, is_public_allowed=True)


async def test_a_name_counts_by_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def answer(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        addresses = {"localhost": ["127.0.0.1", "10.0.0.7"], "gateway": ["127.0.0.1"]}[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    monkeypatch.setattr(loop, "getaddrinfo", answer, raising=False)
    assert await peers_beyond_loopback(["localhost:1", "gateway:1"]) == ["localhost:1"]


async def test_peers_on_other_machines_are_refused_too() -> None:
    peers = ("127.0.0.1:8010", "10.0.0.1:8010")
    with pytest.raises(StartError, match=r"calls 10\.0\.0\.1:8010 without TLS.*--fabric-tls"):
        await check_fabric_exposure(None, peers, FabricTlsSettings())


async def test_tls_needs_no_warning_and_allowed_plaintext_one(tmp_path: Path) -> None:
    peers = ("10.0.0.1:8010",)
    allowed = FabricTlsSettings(fabric_plaintext=True)
    assert not await check_fabric_exposure(
        "0.0.0.0:1", peers, FabricTlsSettings(fabric_tls=tmp_path)
    )
    assert "without TLS" in await check_fabric_exposure("0.0.0.0:1", peers, allowed)
    assert not await check_fabric_exposure("127.0.0.1:1", (), allowed)


async def test_the_warning_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    is_repeated = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            is_repeated.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(exposure.asyncio, "sleep", sleep)
    async with warned_hourly("open"):
        await is_repeated.wait()
    assert caplog.messages == ["open", "open"]
    assert waits == [3600, 3600]
    async with warned_hourly(""):
        assert len(caplog.messages) == 2
