"""Files that a process reads again when they change, without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from pathlib import Path
from typing import NoReturn

_log = logging.getLogger(__name__)
CHECK_INTERVAL_S = 5.0

_Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles(ABC):
    """Files that are read together, such as a certificate and its key.

    The constructor reads them, and raises what `read` raises. Later, if the files cannot be used,
    their last usable content stays in use. `name` is for the log: a plural, such as "keys".
    """

    def __init__(self, name: str, paths: Collection[Path]) -> None:
        self._name = name
        self._paths = paths
        # The stamp is taken before the files are read, so that no change between is missed.
        self._stamp = self._read_stamp()
        self.read()

    @abstractmethod
    def read(self) -> None:
        """Read the files, then use them.

        Raises OSError or ValueError, and changes nothing, if they cannot be used. The message must
        not contain secrets: it is logged.
        """

    def reload(self) -> bool:
        """Read the files. If they cannot be used, the former content stays in use."""
        self._stamp = self._read_stamp()
        try:
            self.read()
        except (OSError, ValueError) as error:
            _log.error("the old %s stay: %s", self._name, reason(error))
            return False
        _log.info("read the %s again: %s", self._name, ", ".join(map(str, self._paths)))
        return True

    def reload_if_changed(self) -> bool:
        """Reload if the files have changed; return whether a new content is in use."""
        return self._read_stamp() != self._stamp and self.reload()

    def _read_stamp(self) -> _Stamp:
        """Return times, sizes and inodes of the files.

        The result also changes if a file disappears, if a link leads to another file, or if the
        mode of a file changes, which may have been why it could not be used.
        """
        found: list[tuple[int, int, int]] = []
        for path in self._paths:
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_ctime_ns, stat.st_size, stat.st_ino))
        return tuple(found)


@contextlib.asynccontextmanager
async def watching(
    files: Collection[WatchedFiles], interval_s: float | None = None
) -> AsyncGenerator[None]:
    """Check `files` at an interval during the body of the `with`."""
    task = asyncio.create_task(watch(files, interval_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def watch(files: Collection[WatchedFiles], interval_s: float | None = None) -> NoReturn:
    """Check `files` every `interval_s`, by default CHECK_INTERVAL_S, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S if interval_s is None else interval_s)
        for one in files:
            one.reload_if_changed()


def reload_on_hangup(files: Collection[WatchedFiles]) -> None:
    """Read `files` again whenever this process gets SIGHUP. Replaces an earlier call."""

    def reload() -> None:
        for one in files:
            one.reload()

    if files:  # without files the signal ends the process, as it does by default
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def reason(error: OSError | ValueError) -> str:
    """Return why a file cannot be used, for the log and for operators."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
