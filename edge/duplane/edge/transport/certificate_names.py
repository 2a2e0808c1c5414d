"""The host names in the edge's certificate, read again when its file changes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509

_log = logging.getLogger(__name__)


class CertificateNames:
    """The host names of a chain of certificates (PEM), in lower case; none without a file."""

    def __init__(self, chain: Path | None) -> None:
        self._chain = chain
        self._names: Sequence[str] = ()
        self._stamp: tuple[int, int, int] | None = None

    def __call__(self) -> Sequence[str]:
        """Return the names. If a changed file cannot be read, the old names stay."""
        if self._chain is None:
            return ()
        # A file that is missing is logged where the certificate is loaded: here, each request of a
        # stranger would cause a line.
        with contextlib.suppress(OSError):
            stat = self._chain.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read(self._chain)
        return self._names

    def _read(self, chain: Path) -> None:
        try:
            self._names = _names(chain.read_bytes())
        except ValueError as error:
            _log.warning("the names in %s cannot be read: %s", chain, error)


def _names(chain: bytes) -> Sequence[str]:
    """Return the DNS names of the first certificate. Raises ValueError."""
    leaf = x509.load_pem_x509_certificates(chain)[0]
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(name.lower() for name in names.get_values_for_type(x509.DNSName))
