"""What one scheduler process is told at its start; every bound of it in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from duplane.fabric.lease import LeaseSigner
from duplane.scheduler.store import check_url


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """One scheduler process. Raises ValueError naming a setting that cannot be."""

    listen: str = "127.0.0.1:8010"
    store: str = "memory:"
    signing_key: Path | None = None  # Ed25519, PEM, no password; None draws one per process
    ticket_limit: int = 1000  # more: QUEUE_FULL
    claim_timeout_s: float = 5.0  # an unclaimed grant goes to the next in line
    report_interval_s: float = 2.0  # asked of workers; one silent for three is not granted from
    queued_interval_s: float = 3.0  # between updates of a place that does not change
    resume_grace_s: float = 3.0  # after a restart, for the queue to come back before any grant
    register_timeout_s: float = 10.0  # a stream whose worker does not say who it is
    stop_timeout_s: float = 2.0  # for calls to end at shutdown; then they are cut

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, int | float) and not value > 0:
                raise ValueError(f"{setting.name} is {value}, must be above 0")
        host, _, port = self.listen.rpartition(":")
        if not (host and port.isdecimal() and int(port) < 65536):
            raise ValueError(f"listen is {self.listen!r}, must be host:port")
        check_url(self.store)

    def open_signer(self) -> LeaseSigner:
        """Return what signs leases. Raises ValueError if the key cannot be used."""
        if self.signing_key is None:
            return LeaseSigner()
        try:
            key = load_pem_private_key(self.signing_key.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"signing_key: {self.signing_key}: {error}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"signing_key: {self.signing_key} is no Ed25519 key")
        return LeaseSigner(key)
