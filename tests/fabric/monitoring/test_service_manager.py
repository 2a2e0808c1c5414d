"""A process tells systemd that it has started, lives and ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from pathlib import Path

import pytest
from support.time_limits import WITHIN_S, until

from duplane.fabric.monitoring.health import reported_health
from duplane.fabric.monitoring.service_manager import ServiceManager, service_manager
from duplane.fabric.process import Shutdown


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[socket.socket]:
    """The socket of systemd, which the environment names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield receiver


async def heard(systemd: socket.socket, *, but: str = "") -> str:
    """Return the next message that is not `but`."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            message = (await asyncio.get_running_loop().sock_recv(systemd, 100)).decode()
            if message != but:
                return message


async def test_service_says_that_it_has_started_and_that_it_ends(systemd: socket.socket) -> None:
    shutdown = Shutdown()
    async with reported_health("edge", "", shutdown) as health:
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
        health.start()
        assert await heard(systemd) == "READY=1"
        shutdown.drain()
        assert await heard(systemd) == "STOPPING=1"


async def test_watchdog_hears_of_a_service_only_while_its_device_answers(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    alive, asked = True, asyncio.Event()

    def answers() -> bool:
        asked.set()
        return alive

    async with reported_health("worker", "", Shutdown()) as health:
        health.start(answers=answers)
        assert await heard(systemd, but="WATCHDOG=1") == "READY=1"
        for _ in range(3):
            assert await heard(systemd) == "WATCHDOG=1"
        alive = False
        asked.clear()
        await asked.wait()  # the sign that was due is not sent
        while True:
            try:
                systemd.recv(100)
            except BlockingIOError:
                break
        for _ in range(3):
            asked.clear()
            await asked.wait()
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
        alive = True
        assert await heard(systemd) == "WATCHDOG=1"


def test_watchdog_of_another_process_is_not_ours() -> None:
    named = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "2000000"}
    assert service_manager(named) == ServiceManager("/run/notify", 2.0)
    assert service_manager({**named, "WATCHDOG_PID": "1"}) == ServiceManager("/run/notify", None)
    assert service_manager({**named, "WATCHDOG_USEC": "0"}) == ServiceManager("/run/notify", None)
    assert service_manager({"NOTIFY_SOCKET": "@a"}) == ServiceManager("\0a", None)
    assert service_manager({"NOTIFY_SOCKET": "vsock:2:1"}) is None
    assert service_manager({"WATCHDOG_USEC": "2000000"}) is None


async def test_service_runs_although_systemd_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")

    async def told_in_vain() -> bool:
        return "cannot tell the service manager READY=1" in caplog.text

    async with reported_health("edge", "", Shutdown()) as health:
        health.start()
        await until(told_in_vain, WITHIN_S)
