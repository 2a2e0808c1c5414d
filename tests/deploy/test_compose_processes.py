"""The services of the compose file run as processes here, as docs/compose.md starts them.

No container tool takes part: the names of services become ports of the loopback address.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import wave
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
from support.compose import is_ours, services
from support.debian_programs import debian_program
from support.paths import ROOT
from support.ports import free_ports
from support.speech import speech_like
from support.time_limits import WITHIN_S, until

pytestmark = pytest.mark.slow

START_S = 4 * WITHIN_S
DUPLANE = (sys.executable, "-m", "duplane.tools")
SERVICES = services(DUPLANE_CHECKPOINT="scripted")
ROLES = {"edge", "scheduler", "worker"}
TALK = re.compile(r"^docker compose --file \S+ exec edge duplane talk (.*)$", re.MULTILINE)
STATUS = re.compile(r"^docker compose --file \S+ run --rm operator$", re.MULTILINE)
ADDRESS = re.compile(r"(0\.0\.0\.0|127\.0\.0\.1|\b[a-z][a-z0-9-]*):(\d+)")
HEALTH_PORT = "8080"


class Host:
    """One machine that runs the services as processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports: dict[tuple[str, str], int] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    def address(self, service: str, port: str) -> str:
        if (service, port) not in self._ports:
            taken = set(self._ports.values())
            self._ports[service, port] = next(one for one in free_ports(20) if one not in taken)
        return f"127.0.0.1:{self._ports[service, port]}"

    def arguments(self, service: str, command: Sequence[str]) -> list[str]:
        """Return a command of a service with the addresses and folders of this machine."""

        def local(found: re.Match[str]) -> str:
            name = found[1] if found[1] in SERVICES else service
            return self.address(name, found[2])

        role = SERVICES[service].get("command", [""])[0]
        own = role if role in ROLES else "operator" if service == "operator" else ""
        certificates = self._folder / "certs" / own
        return [
            re.sub(r"(?<!\w)/certs\b", str(certificates), ADDRESS.sub(local, argument)).replace(
                "/var/lib/etcd", str(self._folder / "etcd")
            )
            for argument in command
        ]

    async def run(self, service: str, *command: str) -> asyncio.subprocess.Process:
        """Start a process with the environment of a service; its output goes to a file."""
        with (self._folder / f"{service}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self.arguments(service, command),
                env=os.environ | {"DUPLANE_HEALTH_LISTEN": self.address(service, HEALTH_PORT)},
                stdout=log,
                stderr=log,
            )

    async def start(self, service: str) -> None:
        command = SERVICES[service]["command"]
        if is_ours(SERVICES[service]):
            program = DUPLANE
        else:
            program = (debian_program("etcd", "etcd-server"),)
            command = command[1:]
        self.processes[service] = await self.run(service, *program, *command)

    async def is_ready(self, service: str) -> bool:
        assert self.processes[service].returncode is None, self.log(service)
        host, port = self.address(service, HEALTH_PORT).split(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return False
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.startswith(b"HTTP/1.1 200 ")

    async def ended(self, service: str) -> int:
        return await asyncio.wait_for(self.processes[service].wait(), START_S)

    def log(self, service: str) -> str:
        return (self._folder / f"{service}.log").read_text()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncGenerator[Host]:
    debian_program("etcd", "etcd-server")  # skips the test if there is no etcd
    host = Host(tmp_path)
    yield host
    for process in host.processes.values():
        if process.returncode is None:
            process.kill()
        await process.wait()


def write_speech(path: Path) -> None:
    samples = (speech_like(1.0) * 32_767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.tobytes())


async def test_the_services_are_a_fabric_that_drains(host: Host, tmp_path: Path) -> None:
    await host.start("certificates")
    assert await host.ended("certificates") == 0, host.log("certificates")
    roles = [name for name, one in SERVICES.items() if one.get("command", [""])[0] in ROLES]
    for service in ("etcd", *roles):
        await host.start(service)
    for service in roles:
        await until(lambda service=service: host.is_ready(service), START_S)

    speech = tmp_path / "speech.wav"
    write_speech(speech)
    page = (ROOT / "docs/compose.md").read_text()
    (talk,) = TALK.findall(page)
    talking = await host.run("edge", *DUPLANE, "talk", str(speech), *shlex.split(talk))
    assert await asyncio.wait_for(talking.wait(), START_S) == 0, host.log("edge")
    assert STATUS.search(page)
    await host.start("operator")
    assert await host.ended("operator") == 0, host.log("operator")
    assert "compose-1" in host.log("operator")
    assert "compose-2" in host.log("operator")

    for service in roles:
        host.processes[service].send_signal(signal.SIGTERM)
    for service in roles:
        assert await host.ended(service) == 0, host.log(service)
