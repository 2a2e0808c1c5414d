"""Settings of TLS between the processes of a fabric. Every process has them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory, ExistingFile

DEFAULT_TRUST_DOMAIN = "duplane.internal"
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}", re.ASCII)


@Parameter(name="*", group="TLS inside the fabric")
@dataclass(frozen=True, slots=True, kw_only=True)
class FabricTlsSettings:
    """How a process proves its role to the others. Raises ValueError that names a wrong setting."""

    fabric_tls: ExistingDirectory | None = None
    """Directory with `tls.crt`, `tls.key` and `ca.crt` (PEM) of this process: speak mutual TLS with
    all processes of the fabric. The files are read again when they change and on SIGHUP; running
    calls continue. `duplane certs check DIR` checks them. Default: no TLS."""
    fabric_trust_domain: str = DEFAULT_TRUST_DOMAIN
    """Trust domain of the fabric: certificates name `spiffe://TRUST-DOMAIN/duplane/ROLE/NAME`. A
    certificate with another trust domain is refused."""
    fabric_plaintext: bool = False
    """Allow addresses beyond this machine without TLS inside the fabric: everybody who reaches such
    an address can then read and end all sessions."""
    fabric_deny: ExistingFile | None = None
    """File with the certificates that schedulers and workers refuse, one in a line: a SPIFFE ID, or
    a fingerprint as `sha256:HEX`; `duplane certs show` prints both. It is read again like the
    certificate; then running calls of a refused certificate end. Needs --fabric-tls."""

    def __post_init__(self) -> None:
        if not _TRUST_DOMAIN.fullmatch(self.fabric_trust_domain):
            raise ValueError(
                f"fabric_trust_domain is {self.fabric_trust_domain!r}, must be letters in lower"
                " case, digits, dots, dashes and underscores"
            )
        if self.fabric_tls and self.fabric_plaintext:
            raise ValueError("fabric_plaintext and fabric_tls exclude each other")
        if self.fabric_deny and not self.fabric_tls:
            raise ValueError("fabric_deny needs fabric_tls")
