"""The edge's certificate. It is replaced when its files change, without a restart.

A handshake uses the certificate that is current when the handshake begins; open connections keep
their certificate. This module uses no sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

_log = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 5.0

_Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate chain and its key (PEM), reloaded when their files change.

    Raises ValueError if the files cannot be used. The listening socket uses `context`, which passes
    every new handshake to `current`.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._stamp = self._read_stamp()
        try:
            self.current = self._load()
            self.context = self._load()
        except OSError as error:
            raise ValueError(f"tls_cert: {chain} with {key}: {_reason(error)}") from None
        self.context.sni_callback = self._choose

    def reload(self) -> bool:
        """Read the files. If they cannot be used, the old certificate stays in use."""
        self._stamp = self._read_stamp()
        try:
            self.current = self._load()
        except OSError as error:
            _log.error("the old certificate stays: %s: %s", self._chain, _reason(error))
            return False
        _log.info("serving the certificate in %s", self._chain)
        return True

    def reload_if_changed(self) -> bool:
        """Reload if the files have changed; return whether a new certificate is in use."""
        return self._read_stamp() != self._stamp and self.reload()

    @contextlib.asynccontextmanager
    async def watching(self, interval_s: float = _CHECK_INTERVAL_S) -> AsyncGenerator[None]:
        """Check the files every `interval_s` during the body of the `with`."""
        watching = asyncio.create_task(self._watch(interval_s))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _watch(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self.reload_if_changed()

    def _choose(self, handshake: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
        handshake.context = self.current

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._chain, self._key, password=_no_password)
        return context

    def _read_stamp(self) -> _Stamp:
        """Return times, sizes and inodes of the files.

        The result also changes if a file disappears.
        """
        found: list[tuple[int, int, int]] = []
        for path in (self._chain, self._key):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)


def _no_password() -> str:
    """Return an empty password, so that OpenSSL does not ask for one on the terminal."""
    return ""


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
