"""What is spoken at each URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.dialect import Dialect
from duplane.edge.entry import Route
from duplane.edge.modes import DUPLEX_MODES, MODES, Mode


@dataclass(frozen=True, slots=True)
class Place:
    """One URL: its dialect, None where the client's first event decides, and its modes."""

    dialect: type[Dialect] | None
    modes: Mapping[str, Mode]


PLACES: Mapping[Route, Place] = {
    Route.REALTIME: Place(None, MODES),
    Route.DUPLEX: Place(DialectC, DUPLEX_MODES),
}
