"""What one generator process does: its sessions, when each sends, and when it is renewed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

UNIT_S = 1.0
Phases = Literal["spread", "step"]
DIALECTS = ("A", "B", "C", "grpc")
"""Protocols that have units, and `grpc`, which goes past the edge."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of one generator process, which gets it as JSON."""

    url: str  # ws:// or wss:// of an edge; in dialect `grpc` the address of a scheduler
    dialect: str  # one of DIALECTS
    open_timeout_s: float  # for a session to open, with its wait for a slot
    ca: str | None  # file of certificates that wss:// trusts
    sessions: Sequence[int]  # this process's, out of 0 to session_count - 1
    session_count: int
    phases: Phases
    warm_up_units: int  # of each session, which are sent and not measured
    units: int  # of each session after those
    session_units: int  # after which a session ends and another takes its place

    def phase_s(self, session: int) -> float:
        """Return when in each second a session sends."""
        return UNIT_S * session / self.session_count if self.phases == "spread" else 0.0

    def is_renewed(self, session: int, number: int) -> bool:
        """Return whether a session is renewed before unit `number`, counted from 0.

        Sessions do not renew together: their turns are spread over the length of a session.
        """
        offset = self.session_units * session // self.session_count
        return number > 0 and (number + offset) % self.session_units == 0

    def is_measured(self, number: int) -> bool:
        """Return whether unit `number` comes after the warm-up."""
        return number >= self.warm_up_units


def share(session_count: int, process_count: int) -> Sequence[Sequence[int]]:
    """Distribute sessions over processes; none is without a session."""
    processes = min(session_count, process_count)
    return [range(first, session_count, processes) for first in range(processes)]
