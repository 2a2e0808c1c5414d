"""Wall clocks that tests can set while processes run. Monotonic clocks do not change.

The library libfaketime is loaded into a process. The library reads from a file by how much the
clock of the process differs from the real clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.debian_programs import debian_library
from support.fabric.hosts import Host
from support.fabric.servers import Server


class WallClock:
    """The wall clock of some processes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, hours: float) -> None:
        """Set the clock ahead of the real clock by this time; a negative time sets it behind."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{3600 * hours:+.0f}\n")
        new.replace(self._file)

    @property
    def command(self) -> Sequence[str]:
        """The arguments that, put before a command, make its process use this clock."""
        library = debian_library("faketime/libfaketime.so.1", "libfaketime")
        return (
            *("env", f"LD_PRELOAD={library}", f"FAKETIME_TIMESTAMP_FILE={self._file}"),
            *("FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1"),
        )


@contextlib.contextmanager
def wall_clock(servers: Sequence[Server[Host]], folder: Path) -> Iterator[WallClock]:
    """Restart servers with a clock that can be set. At the end restart them with the real clock."""
    clock = WallClock(folder / "clock")
    commands = [server.command for server in servers]
    try:
        for server in servers:
            _restart(server, (*clock.command, *server.command))
        yield clock
    finally:
        for server, command in zip(servers, commands, strict=True):
            _restart(server, command)


def _restart(server: Server[Host], command: Sequence[str]) -> None:
    server.kill()
    server.command = command
    server.start()
