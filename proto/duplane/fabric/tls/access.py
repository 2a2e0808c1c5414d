"""Which roles may call which rpc. Pure. An rpc that is not in the table is refused to everybody."""

from __future__ import annotations

from collections.abc import Mapping

from duplane.fabric.tls.identity import Role

OPERATOR_KEY = "duplane-operator"
"""Metadata of a call that an edge makes for an operator: the operator's name."""

_CALLERS = frozenset({Role.EDGE, Role.CLIENT})
_READERS = frozenset({Role.EDGE, Role.OPERATOR})
_ADMIN = "/duplane.fabric.v1.AdminService/"
_LEASES = "/duplane.fabric.v1.LeaseService/"

FOR_OPERATORS = frozenset(
    f"{_ADMIN}{name}"
    for name in ("DrainWorker", "UndrainWorker", "CancelTicket", "EndSession", "UpdateEstimates")
)
"""Rpcs of operators. An edge may make them only if it names the operator that it acts for."""

ALLOWED: Mapping[str, frozenset[Role]] = {
    f"{_LEASES}AcquireLease": _CALLERS,
    f"{_LEASES}ReleaseLease": _CALLERS | {Role.OPERATOR},
    "/duplane.fabric.v1.RegistryService/Attach": frozenset({Role.WORKER}),
    "/duplane.fabric.v1.SessionService/Converse": _CALLERS,
    "/duplane.fabric.v1.SessionService/TakeOver": frozenset({Role.EDGE}),
    "/duplane.fabric.v1.SessionService/Chat": _CALLERS,
    f"{_ADMIN}ListWorkers": _READERS,
    f"{_ADMIN}ListLeases": _READERS,
    f"{_ADMIN}ListTickets": _READERS,
    f"{_ADMIN}Watch": _READERS,
    f"{_ADMIN}GetEstimates": _READERS,
    **dict.fromkeys(FOR_OPERATORS, _READERS),
    "/grpc.health.v1.Health/Check": frozenset(Role),
    "/grpc.health.v1.Health/Watch": frozenset(Role),
}
"""The roles that may call each rpc, by its path."""


def for_operator(name: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call that an edge makes for an operator."""
    # Metadata must be printable ASCII characters.
    return ((OPERATOR_KEY, name.encode("ascii", "backslashreplace").decode() or "unnamed"),)


def refusal(method: str, role: Role, operator: str) -> str:
    """Return why a call is refused; empty if it is allowed.

    `operator` is the operator that an edge acts for, or empty.
    """
    if role not in ALLOWED.get(method, frozenset()):
        return f"the role {role} may not call {method}"
    if method in FOR_OPERATORS and role is Role.EDGE and not operator:
        return f"an edge may call {method} only for an operator, whom `{OPERATOR_KEY}` names"
    return ""
