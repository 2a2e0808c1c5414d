"""Which dialect a client of /v1/realtime speaks: its first event of a known type decides."""

from __future__ import annotations

from collections.abc import Mapping

from duplane.edge.dialects import a, b
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.dialect import Dialect
from duplane.edge.dialects.fields import Fields

FIRST_EVENTS: Mapping[str, type[Dialect]] = {
    a.UPDATE: DialectA,
    b.INIT: DialectB,
    b.APPEND: DialectB,
}


def detect(kind: object) -> type[Dialect] | None:
    """Return the dialect whose clients begin with an event of type `kind`.

    None leaves it open: such an event is answered as in A, and the next may decide. The queue
    events that come before are equal in both.
    """
    return FIRST_EVENTS.get(kind) if isinstance(kind, str) else None


def needs_init(kind: object) -> bool:
    """Tell whether this first event implies settings, as B's own gateway took it."""
    return kind == b.APPEND


def implied_init() -> Fields:
    """Return the settings event that is implied."""
    return Fields({"type": b.INIT, "payload": {}})
