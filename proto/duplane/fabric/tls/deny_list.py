"""The certificates that a process refuses although their CA is trusted."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from cryptography import x509

from duplane.fabric.tls.certificates import fingerprint
from duplane.fabric.tls.identity import parse_identity
from duplane.fabric.watched_files import WatchedFiles

_MAX_FILE_BYTES = 16 * 1024 * 1024
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


class DenyList(WatchedFiles):
    """The lines of a file: SPIFFE IDs and fingerprints; `#` begins a comment.

    Raises ValueError for an unknown form of a line, because a list with an error in it would not
    refuse what its operator wants refused. `on_change` is called after each later read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: frozenset[str] = frozenset()
        self._has_fingerprints = False
        self.on_change: Callable[[], None] = lambda: None
        try:
            super().__init__(f"entries of the deny list in {path}", (path,))
        except OSError as error:
            raise ValueError(f"fabric_deny: {path}: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"fabric_deny: {error}") from None

    def read(self) -> None:
        """Read the file. Raises OSError or ValueError."""
        with self._path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"{self._path} is longer than {_MAX_FILE_BYTES} bytes")
        entries = parse_entries(content.decode("utf-8"), str(self._path))
        self._entries = entries
        self._has_fingerprints = any(_FINGERPRINT.fullmatch(entry) for entry in entries)
        self.on_change()

    def refuses(self, spiffe_id: str, certificate_pem: bytes) -> bool:
        """Return whether the certificate of a peer is listed."""
        if spiffe_id in self._entries:
            return True
        return self._has_fingerprints and _fingerprint(certificate_pem) in self._entries


def parse_entries(text: str, name: str) -> frozenset[str]:
    """Return the entries of a deny list. Raises ValueError that names the file and the line."""
    entries: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        if not _FINGERPRINT.fullmatch(entry.lower()):
            try:
                parse_identity(entry)
            except ValueError as error:
                raise ValueError(f"{name}, line {number}: {error}, or sha256:HEX") from None
        entries.add(entry.lower() if entry.lower().startswith("sha256:") else entry)
    return frozenset(entries)


@lru_cache(1024)
def _fingerprint(certificate_pem: bytes) -> str:
    try:
        return fingerprint(x509.load_pem_x509_certificate(certificate_pem))
    except ValueError:
        return ""
