"""Runs the ten commands of docs/security.md: a public edge with keys, and mutual TLS inside."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import ssl
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from support.paths import ROOT
from support.ports import free_ports
from support.time_limits import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not in PATH"),
]

START_S = 60.0
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FOLDER = "/tmp/duplane-public"


class Shell:
    """A shell in which a user types the commands of the page."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def type(self, *commands: str) -> int:
        """Run commands until one fails; return the exit code of the last."""
        assert self._process.stdin
        assert self._process.stdout
        for command in commands:
            self._process.stdin.write(f"{command}\necho ended $?\n".encode())
            while not (line := await self._process.stdout.readline()).startswith(b"ended "):
                assert line, self.log
            if code := int(line.split()[1]):
                return code
        return 0

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncGenerator[Shell]:
    programs = tmp_path / "programs"
    programs.mkdir()
    duplane = programs / "duplane"
    duplane.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m duplane.tools "$@"\n')
    duplane.chmod(0o755)
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            "sh",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
            start_new_session=True,
        )
    try:
        yield Shell(process, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_ten_commands_lead_to_a_public_edge_with_keys(shell: Shell, tmp_path: Path) -> None:
    page = (ROOT / "docs/security.md").read_text()
    scheduler, public, operators = free_ports(3)
    block = BLOCK.findall(page)[0].replace(FOLDER, str(tmp_path / "public"))
    for written, used in ((8010, scheduler), (8443, public), (8007, operators)):
        block = block.replace(f":{written}", f":{used}")
    commands = block.strip().splitlines()
    assert len(commands) == 10
    assert await shell.type(*commands[:8]) == 0, shell.log
    context = ssl.create_default_context(cafile=tmp_path / "public/edge.crt")
    url = f"https://127.0.0.1:{public}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:

        async def answers() -> bool:
            try:
                async with http.get(f"{url}/health") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await until(answers, START_S)
        async with http.get(f"{url}/v1/realtime?mode=audio") as answer:
            assert answer.status == 401
        async with http.get(f"{url}/workers") as answer:
            assert answer.status in (401, 404)
        key = (tmp_path / "public/alice.key").read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        async with http.get(f"http://127.0.0.1:{operators}/workers", headers=headers) as answer:
            assert answer.status == 200
    assert await shell.type(*commands[8:]) == 0, shell.log
