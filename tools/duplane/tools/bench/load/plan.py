"""The plan of one load generator: when each session sends, and when a new one replaces it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

UNIT_S = 1.0
Phases = Literal["spread", "step"]
DIALECTS = ("A", "B", "C", "E", "L", "grpc")
"""Protocols that have units, and `grpc`, which connects directly to a worker."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one load generator, a process that receives it as JSON."""

    url: str  # ws:// or wss:// of an edge; in dialect `grpc` the address of a scheduler
    dialect: str  # one of DIALECTS
    open_timeout_s: float  # time limit to open a session, with its wait for a slot
    ca: str | None  # file of certificates to trust with wss://
    is_resumable: bool  # the sessions ask to be resumable
    sessions: Sequence[int]  # numbers of this process's sessions, below session_count
    session_count: int
    phases: Phases
    warm_up_units: int  # units of each session that are sent but not measured
    units: int  # measured units of each session
    session_units: int  # a session ends after this many units, and a new one replaces it

    def phase_s(self, session: int) -> float:
        """Return the fraction of each second at which a session sends."""
        return UNIT_S * session / self.session_count if self.phases == "spread" else 0.0

    def is_renewed(self, session: int, number: int) -> bool:
        """Return whether a session is closed and replaced by a new one before unit `number`.

        Units are counted from 0. Different sessions are replaced at different units, spread evenly
        over `session_units`.
        """
        offset = self.session_units * session // self.session_count
        return number > 0 and (number + offset) % self.session_units == 0

    def is_measured(self, number: int) -> bool:
        """Return whether unit `number` comes after the warm-up."""
        return number >= self.warm_up_units


def share(session_count: int, process_count: int) -> Sequence[Sequence[int]]:
    """Distribute sessions over processes, so that each process has at least one."""
    processes = min(session_count, process_count)
    return [range(first, session_count, processes) for first in range(processes)]
