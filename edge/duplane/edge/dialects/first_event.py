"""Detects whether a client of /v1/realtime speaks dialect A or B, by its first known event."""

from __future__ import annotations

from collections.abc import Mapping

from duplane.edge.dialects import a, b_events
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.payload.fields import Fields

FIRST_EVENTS: Mapping[str, type[DuplexDialect]] = {
    a.UPDATE: DialectA,
    b_events.INIT: DialectB,
    b_events.APPEND: DialectB,
}


def detect(kind: object) -> type[DuplexDialect] | None:
    """Return the dialect whose clients begin with an event of type `kind`.

    Returns None if the type belongs to neither dialect. Then the edge answers as in A, and a later
    event decides the dialect. Queue events are the same in A and B, so the edge can send them
    before the dialect is known.
    """
    return FIRST_EVENTS.get(kind) if isinstance(kind, str) else None


def needs_init(kind: object) -> bool:
    """Return whether this first event implies empty settings, as it does in the reference."""
    return kind == b_events.APPEND


def implied_init() -> Fields:
    """Return the settings event that an append implies if it is the first event."""
    return Fields({"type": b_events.INIT, "payload": {}})
