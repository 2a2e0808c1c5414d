"""Processes of a fabric that a test can kill, freeze and restart, each with its own log file."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, Protocol, TypeVar

from support.time_limits import WITHIN_S

DUPLANE = (sys.executable, "-m", "duplane.tools")


class Machine(Protocol):
    """Where processes run."""

    @property
    def ip(self) -> str: ...

    def start(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a process; its output goes to `log`."""
        ...


AnyMachine = TypeVar("AnyMachine", bound=Machine)


class Loopback:
    """This machine."""

    ip = "127.0.0.1"

    def start(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, which Ctrl-C does not reach."""
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


@dataclass
class Server(Generic[AnyMachine]):
    """One process of the fabric. A test can kill, freeze and restart it."""

    name: str
    host: AnyMachine
    port: int
    command: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.host.ip}:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = self.host.start(self.command, log)

    def send(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self, within_s: float = WITHIN_S) -> int:
        assert self.process
        return self.process.wait(within_s)

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None
