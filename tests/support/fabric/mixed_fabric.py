"""Fabrics with processes of this release and of the former release."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.paths import ROOT
from support.time_limits import WITHIN_S

from duplane.fabric import process

# The commit whose processes must work together with those of this tree. It changes with each
# release.
FORMER_RELEASE = "2a6b59c7489e2e53c9263c247983aa4c2676ffd6"
_FOLDERS = ("proto", "edge", "scheduler", "worker", "tools")


def former_environment(folder: Path) -> dict[str, str]:
    """Unpack the former release into `folder`; return the environment that runs its processes.

    Skips the test if this is no clone of the repository with its history.
    """
    command = ("git", "-C", str(ROOT), "archive", "--format=tar", FORMER_RELEASE, *_FOLDERS)
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the former release is not in this clone: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as sources:
        sources.extractall(folder, filter="data")
    paths = os.pathsep.join(str(folder / name) for name in _FOLDERS)
    return {**os.environ, "PYTHONPATH": paths}


@dataclass
class Server:
    """One process of the fabric."""

    process: asyncio.subprocess.Process
    address: str

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        """Ask the process to end, and assert that it ends as planned."""
        self.process.terminate()
        assert await self.process.wait() == 0


@dataclass
class MixedFabric:
    """Starts processes of both releases, and kills them at the end."""

    former: Mapping[str, str]
    _servers: list[Server] = field(default_factory=list[Server])

    @classmethod
    @contextlib.asynccontextmanager
    async def starting(cls, former: Mapping[str, str]) -> AsyncGenerator[MixedFabric]:
        fabric = cls(former)
        try:
            yield fabric
        finally:
            for server in fabric._servers:
                await server.kill()

    async def start(
        self, role: str, *flags: str, is_former: bool, listen: str = "127.0.0.1:0"
    ) -> Server:
        command = (sys.executable, "-m", "duplane.tools", role, *flags)
        started = await asyncio.create_subprocess_exec(
            *(*command, "--listen", listen, "--log-level", "WARNING"),
            stdout=asyncio.subprocess.PIPE,
            env=self.former if is_former else None,
        )
        server = Server(started, "")
        self._servers.append(server)
        assert started.stdout
        async with asyncio.timeout(WITHIN_S):
            async for line in started.stdout:
                match line.decode().split():
                    case [process.READY, _, address]:
                        server.address = address
                        return server
        raise AssertionError(f"{role} has ended")

    async def start_worker(self, scheduler: Server, checkpoint: str, *, is_former: bool) -> Server:
        flags = ("--scheduler", scheduler.address, "--checkpoint", checkpoint, "--slots", "1")
        return await self.start("worker", *flags, is_former=is_former)
