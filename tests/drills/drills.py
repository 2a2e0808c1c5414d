"""The drills: each causes the fault of one page of the runbook and follows the page to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Drill = Callable[[Path], Awaitable[None]]


@dataclass(frozen=True)
class Entry:
    """A drill. Its alerts fire during the drill."""

    alerts: Sequence[str]
    run: Drill


DRILLS: dict[str, Entry] = {}
"""By the anchor of the page."""


def drill(page: str, *alerts: str) -> Callable[[Drill], Drill]:
    """Register the drill of a page."""

    def register(run: Drill) -> Drill:
        DRILLS[page] = Entry(alerts, run)
        return run

    return register
