"""The units of systemd: what systemd's own tools say of them, and their commands as processes.

No test runs systemd itself, so nothing here shows the effect of the confinement on a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from support.fabric.real_fabric import DUPLANE
from support.paths import ROOT
from support.ports import free_ports
from support.time_limits import WITHIN_S
from support.tools.command import run_command

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
MAX_EXPOSURE = 1.6
PROGRAM = "/opt/duplane/bin/duplane"
NAME = "here"
ANALYSE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYSE is None, reason="needs systemd-analyze")


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Return the values of each setting of the section [Service], in order."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().partition("[Service]")[2].partition("[Install]")[0].splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_there_is_a_unit_for_each_role() -> None:
    assert [unit.name for unit in UNITS] == [
        "duplane-edge.service",
        "duplane-scheduler.service",
        "duplane-worker@.service",
    ]


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_no_fault_and_little_exposure(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(PROGRAM, "/bin/sh"))  # verify wants a program
    verified = analysed("verify", str(copy))
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    rated = analysed("security", "--offline=true", "--no-pager", str(copy)).stdout
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", rated)
    assert exposure, rated
    assert float(exposure[1]) <= MAX_EXPOSURE, rated


def analysed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ANALYSE or "", *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_credentials_are_the_files_of_the_fabric(unit: Path) -> None:
    settings = settings_of(unit)
    named = [value.partition(":")[0] for value in settings["LoadCredential"]]
    assert named == ["tls.crt", "tls.key", "ca.crt"]
    assert "--fabric-tls %d" in settings["ExecStart"][0]


@pytest.mark.slow
async def test_commands_of_the_units_tell_systemd_when_they_serve_and_drain(
    tmp_path: Path,
) -> None:
    code, output = run_command("certs", "dev", str(tmp_path / "certs"), "--name", NAME)
    assert code == 0, output
    (port,) = free_ports(1)
    at = f"127.0.0.1:{port}"
    config = tmp_path / "duplane.toml"
    config.write_text(
        f'[scheduler]\nlisten = "{at}"\n'
        f'[worker]\nscheduler = "{at}"\ncheckpoint = "scripted"\n'
        f'[edge]\nscheduler = "{at}"\nlisten = "127.0.0.1:0"\n'
    )
    async with asyncio.timeout(3 * WITHIN_S), contextlib.AsyncExitStack() as stack:
        for role, unit in (("scheduler", UNITS[1]), ("worker", UNITS[2]), ("edge", UNITS[0])):
            running = serving(role, settings_of(unit)["ExecStart"][0], config)
            await stack.enter_async_context(running)


@contextlib.asynccontextmanager
async def serving(role: str, command: str, config: Path) -> AsyncGenerator[Process]:
    """Run the command of a unit as systemd does; at the end, stop it as systemd does."""
    specifiers = {"%d": str(config.parent / "certs" / role), "%i": "cpu", "%H": NAME}
    program, *arguments = shlex.split(command)
    assert program == PROGRAM
    for specifier, value in specifiers.items():
        arguments = [argument.replace(specifier, value) for argument in arguments]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(config.parent / f"{role}.socket"))
        systemd.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            *(*DUPLANE, *arguments),
            stdout=PIPE,
            stderr=PIPE,
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                "DUPLANE_CONFIG": str(config),
                "NOTIFY_SOCKET": str(config.parent / f"{role}.socket"),
                "WATCHDOG_USEC": "60000000",
            },
        )
        try:
            await until_said(systemd, process, "READY=1")
            yield process
            process.terminate()
            await until_said(systemd, process, "STOPPING=1")
            output = await process.communicate()
            assert process.returncode == 0, output
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def until_said(systemd: socket.socket, process: Process, expected: str) -> None:
    """Wait for a message. Signs of life may come first."""
    ended = asyncio.ensure_future(process.wait())
    said = ""
    while said != expected:
        hearing = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(systemd, 100))
        await asyncio.wait({hearing, ended}, return_when=asyncio.FIRST_COMPLETED)
        if hearing.done():
            said = hearing.result().decode()
        else:  # what the process has said before its end may still wait in the socket
            hearing.cancel()
            with contextlib.suppress(BlockingIOError):
                said = systemd.recv(100).decode()
        assert said in (expected, "WATCHDOG=1"), (await process.communicate())[1].decode()
    ended.cancel()
