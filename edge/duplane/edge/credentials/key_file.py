"""Reads a file of keys again when it changes; a file that cannot be used changes nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from duplane.edge.credentials.keys import KeyRing
from duplane.fabric.secret_files import check_secret_file

_log = logging.getLogger(__name__)
_MAX_BYTES = 4 * 1024 * 1024

_Stamp = tuple[int, int, int]


class KeyFile:
    """The keys in one file. Raises ValueError that begins with `name`, the name of the setting.

    `parse` returns the content of a text, or raises ValueError. `wall_s` returns the Unix time.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        parse: Callable[[str, float], KeyRing],
        wall_s: Callable[[], float],
    ) -> None:
        self._path = path
        self._name = name
        self._parse = parse
        self._wall_s = wall_s
        self._stamp = self._read_stamp()
        self.ring = self._load()

    def reload(self) -> bool:
        """Read the file. If it cannot be used, the old keys stay in use."""
        self._stamp = self._read_stamp()
        try:
            self.ring = self._load()
        except ValueError as error:
            _log.error("the old keys stay: %s", error)
            return False
        _log.info("read %d keys in %s", len(self.ring.keys), self._path)
        return True

    def reload_if_changed(self) -> bool:
        """Reload if the file has changed; return whether new keys are in use."""
        return self._read_stamp() != self._stamp and self.reload()

    def _load(self) -> KeyRing:
        check_secret_file(self._path, self._name)
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise ValueError(f"the file has more than {_MAX_BYTES} bytes")
            return self._parse(content.decode(), self._wall_s())
        except OSError as error:
            problem = error.strerror or str(error)
        except UnicodeDecodeError:
            problem = "the file is not UTF-8"
        except ValueError as error:
            problem = str(error)
        raise ValueError(f"{self._name}: {self._path}: {problem}")

    def _read_stamp(self) -> _Stamp | None:
        """Return what changes with the content, the mode or the inode; None without a file."""
        with contextlib.suppress(OSError):
            stat = self._path.stat()
            return stat.st_ctime_ns, stat.st_size, stat.st_ino
        return None
