"""The names that certificates of a fabric have. Pure.

A certificate names its process in the subject alternative name, as
`spiffe://TRUST-DOMAIN/duplane/ROLE/NAME`. Servers read this name. Clients of gRPC can check only
DNS names, so a certificate also has the DNS name `ROLE.duplane.internal`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

MAX_NAME_LENGTH = 128
_SPIFFE_ID = re.compile(
    r"spiffe://(?P<domain>[a-z0-9._-]{1,255})/duplane/(?P<role>[a-z]+)"
    rf"/(?P<name>[A-Za-z0-9._-]{{1,{MAX_NAME_LENGTH}}})",
    re.ASCII,
)


class Role(StrEnum):
    """What a process does in a fabric. A client is an internal client other than an edge."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    EDGE = "edge"
    OPERATOR = "operator"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Identity:
    """The process that a certificate belongs to."""

    trust_domain: str
    role: Role
    name: str

    def __str__(self) -> str:
        return f"spiffe://{self.trust_domain}/duplane/{self.role}/{self.name}"

    @property
    def holder(self) -> bytes:
        """The bytes with which leases and tickets are bound to this process."""
        return hashlib.sha256(str(self).encode()).digest()

    def may_register_as(self, worker_id: str) -> bool:
        """Return whether a worker with this certificate may have the id `worker_id`.

        Several workers of one host can share a certificate: their ids begin with its name.
        """
        return worker_id == self.name or worker_id.startswith(f"{self.name}-")


def parse_identity(spiffe_id: str) -> Identity:
    """Parse a SPIFFE ID. Raises ValueError if it names no process of a fabric."""
    match = _SPIFFE_ID.fullmatch(spiffe_id)
    if match is None or match["role"] not in set(Role):
        raise ValueError(f"{spiffe_id!r} is not spiffe://TRUST-DOMAIN/duplane/ROLE/NAME")
    return Identity(match["domain"], Role(match["role"]), match["name"])


def server_name(role: Role) -> str:
    """Return the DNS name of all certificates of a role."""
    return f"{role}.duplane.internal"
