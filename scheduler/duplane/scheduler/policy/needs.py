"""Needs: the labels that a worker must have for a ticket. Pure."""

from __future__ import annotations

from duplane.fabric.v1 import lease_pb2, registry_pb2

Needs = frozenset[tuple[str, str]]
"""Names and values of labels. A worker meets the needs if its labels include them."""

NO_NEEDS: Needs = frozenset()


def needs_of(request: lease_pb2.AcquireLeaseRequest) -> Needs:
    """Return the needs of a request."""
    return frozenset(request.needs.items()) if request.needs else NO_NEEDS


def demand_of(
    request: lease_pb2.AcquireLeaseRequest,
) -> tuple[str, lease_pb2.SessionKind, Needs]:
    """Return what decides which slots a request can use: its pool, its kind and its needs."""
    return request.pool, request.kind, needs_of(request)


def labels_of(register: registry_pb2.Register) -> Needs:
    """Return the labels of a worker."""
    return frozenset(register.labels.items())
