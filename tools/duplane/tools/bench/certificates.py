"""The certificates of a fabric that a benchmark starts."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.tls.identity import Identity, Role
from duplane.fabric.tls.issuing import Authority, write_leaf
from duplane.fabric.tls.settings import DEFAULT_TRUST_DOMAIN

NAME = socket.gethostname()
"""The name in the certificates. The default ids of workers begin with it."""
_LIFE = timedelta(days=7)


def make_certificates(directory: Path) -> FabricCredentials:
    """Write the certificates of all roles; return those of an operator."""
    authority = Authority.make()
    for role in Role:
        chain, key = authority.issue(Identity(DEFAULT_TRUST_DOMAIN, role, NAME), _LIFE)
        write_leaf(directory / role, chain, key, authority.pem)
    return FabricCredentials(directory / Role.OPERATOR, Role.OPERATOR, DEFAULT_TRUST_DOMAIN)


def credentials_of(directory: Path | None, role: Role) -> FabricCredentials | None:
    """Return the credentials of a role; None without certificates."""
    return FabricCredentials(directory / role, role, DEFAULT_TRUST_DOMAIN) if directory else None
