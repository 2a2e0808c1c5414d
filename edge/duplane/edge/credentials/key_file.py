"""Reads a file of keys again when it changes; a file that cannot be used changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from duplane.edge.credentials.keys import KeyRing
from duplane.fabric.secret_files import check_secret_file
from duplane.fabric.watched_files import WatchedFiles

_MAX_BYTES = 4 * 1024 * 1024


class KeyFile(WatchedFiles):
    """The keys in one file. Raises ValueError that begins with `setting`, its name.

    `parse` returns the content of a text, or raises ValueError. `wall_s` returns the Unix time.
    """

    def __init__(
        self,
        path: Path,
        setting: str,
        parse: Callable[[str, float], KeyRing],
        wall_s: Callable[[], float],
    ) -> None:
        self._path = path
        self._setting = setting
        self._parse = parse
        self._wall_s = wall_s
        super().__init__("keys", (path,))

    def read(self) -> None:
        """Read the file. Raises ValueError."""
        self.ring = self._load()

    def _load(self) -> KeyRing:
        check_secret_file(self._path, self._setting)
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
        raise ValueError(f"{self._setting}: {self._path}: {problem}")
