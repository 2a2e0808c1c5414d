"""The edge's certificate. It is replaced when its files change, without a restart.

A handshake uses the certificate that is current when the handshake begins; open connections keep
their certificate. This module uses no sockets.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography import x509

from duplane.fabric.watched_files import WatchedFiles, reason


class Certificate(WatchedFiles):
    """A certificate chain and its key (PEM), reloaded when their files change.

    Raises ValueError if the files cannot be used. The listening socket uses `context`, which passes
    every new handshake to `current`.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        try:
            super().__init__(f"certificates in {chain}", (chain, key))
            self.context = self._load()
        except OSError as error:
            raise ValueError(f"tls_cert: {chain} with {key}: {reason(error)}") from None
        self.context.sni_callback = self._choose

    def read(self) -> None:
        """Load the files into a new context for later handshakes. Raises OSError."""
        self.current = self._load()
        self.leaf = _leaf(self._chain)

    def _choose(self, handshake: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
        handshake.context = self.current

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._chain, self._key, password=_no_password)
        return context


def _leaf(chain: Path) -> x509.Certificate | None:
    """Return the certificate of the key, the first one; None if only OpenSSL can read it."""
    try:
        return x509.load_pem_x509_certificates(chain.read_bytes())[0]
    except ValueError:
        return None


def _no_password() -> str:
    """Return an empty password, so that OpenSSL does not ask for one on the terminal."""
    return ""
