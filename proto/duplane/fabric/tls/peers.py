"""The process at the other end of a call, as its certificate names it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import grpc.aio

from duplane.fabric.tls.identity import Identity, parse_identity

_SPIFFE_ID = "peer_spiffe_id"  # only URIs; `peer_identities` mixes them with other names
_CERTIFICATE = "x509_pem_cert"


def peer_identity(context: grpc.aio.ServicerContext[Any, Any]) -> Identity | None:
    """Return who makes a call; None without TLS, or if the certificate names no process.

    A call without such a name reaches a servicer only without TLS: `RoleInterceptor` refuses it.
    """
    values = tuple(context.auth_context().get(_SPIFFE_ID, ()))
    return _parse(values[0]) if len(values) == 1 else None


def peer_holder(context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
    """Return the holder of the leases and tickets that the caller asks for; None without TLS."""
    caller = peer_identity(context)
    return caller.holder if caller else None


def peer_certificate(context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    """Return the certificate of the caller (PEM); empty without TLS."""
    return next(iter(context.auth_context().get(_CERTIFICATE, ())), b"")


@lru_cache(1024)
def _parse(spiffe_id: bytes) -> Identity | None:
    try:
        return parse_identity(spiffe_id.decode("ascii"))
    except ValueError:
        return None
