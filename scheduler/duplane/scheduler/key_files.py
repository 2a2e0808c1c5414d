"""Reads the keys and certificates that the settings of a scheduler name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from duplane.fabric.lease_signing import LeaseSigner
from duplane.fabric.tls.certificates import check_pair, parse_certificates
from duplane.fabric.watched_files import WatchedFiles
from duplane.scheduler.etcd.credentials import Credentials
from duplane.scheduler.settings import SchedulerSettings


def open_signer(settings: SchedulerSettings) -> LeaseSigner:
    """Return the signer of leases. Raises ValueError if the key cannot be used."""
    if settings.signing_key is None:
        return LeaseSigner()
    try:
        key = load_pem_private_key(settings.signing_key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"signing_key: {settings.signing_key}: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"signing_key: {settings.signing_key} is not an Ed25519 key")
    return LeaseSigner(key)


class StoreCredentials(WatchedFiles):
    """The credentials for the store. Raises ValueError if a file cannot be read.

    `on_change` is called with the new credentials after each later read.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self.on_change: Callable[[Credentials], None] = lambda _: None
        named = (
            settings.store_ca,
            settings.store_cert,
            settings.store_key,
            settings.store_password,
        )
        paths = [path for path in named if path]
        super().__init__("credentials for the store", paths)

    def read(self) -> None:
        """Read the files. Raises ValueError that names a file that cannot be read."""
        settings = self._settings
        ca = _read("store_ca", settings.store_ca)
        if ca is not None:
            parse_certificates(ca, f"store_ca: {settings.store_ca}")
        certificate, key = _read_pair(settings.store_cert, settings.store_key)
        password = _read("store_password", settings.store_password)
        tls = grpc.ssl_channel_credentials(ca, key, certificate) if ca else None
        self.current = Credentials(
            tls=tls, user=settings.store_user, password=(password or b"").decode().strip()
        )
        self.on_change(self.current)


def _read_pair(certificate: Path | None, key: Path | None) -> tuple[bytes | None, bytes | None]:
    """Return a certificate and its key. Raises ValueError if they do not fit.

    While the files are replaced, one may be newer than the other, or empty. gRPC ends the process
    if it gets such files.
    """
    certificate_pem, key_pem = _read("store_cert", certificate), _read("store_key", key)
    if certificate_pem is not None and key_pem is not None:
        parse_certificates(certificate_pem, f"store_cert: {certificate}")
        check_pair(certificate_pem, key_pem, f"store_key: {key}")
    return certificate_pem, key_pem


def _read(name: str, path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error}") from None
