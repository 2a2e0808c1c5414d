"""Reads the keys and certificates that the settings of a scheduler name."""

from __future__ import annotations

from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from duplane.fabric.lease_signing import LeaseSigner
from duplane.scheduler.etcd.credentials import Credentials
from duplane.scheduler.settings import SchedulerSettings


def open_signer(settings: SchedulerSettings) -> LeaseSigner:
    """Return the signer of leases. Raises ValueError if the key cannot be used."""
    if settings.signing_key is None:
        return LeaseSigner()
    try:
        key = load_pem_private_key(settings.signing_key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"signing_key: {settings.signing_key}: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"signing_key: {settings.signing_key} is not an Ed25519 key")
    return LeaseSigner(key)


def open_credentials(settings: SchedulerSettings) -> Credentials:
    """Return the credentials for the store. Raises ValueError if a file cannot be read."""
    ca, certificate = _read("store_ca", settings.store_ca), _read("store_cert", settings.store_cert)
    key, password = (
        _read("store_key", settings.store_key),
        _read("store_password", settings.store_password),
    )
    tls = grpc.ssl_channel_credentials(ca, key, certificate) if ca else None
    return Credentials(
        tls=tls, user=settings.store_user, password=(password or b"").decode().strip()
    )


def _read(name: str, path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error}") from None
