"""The figures from which a fabric is sized, each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

FIGURES_PAGE = "docs/figures.md"


@dataclass(frozen=True)
class Measured:
    """A figure of a section of `docs/figures.md`, as this section writes it."""

    value: float
    text: str
    section: str

    @property
    def source(self) -> str:
        """Where the figure comes from."""
        return f'measured: {FIGURES_PAGE}, "{self.section}"'


SESSIONS_PER_EDGE_CORE = Measured(287, "287", "Sessions per core")
EDGE_MB = Measured(94, "94", "Soak")
EDGE_SESSION_MB = Measured(3.7, "3.1 to 3.7 MB per session", "Killed workers")
JOURNAL_MB_PER_MINUTE = Measured(1.9, "1.9 MB per minute of audio", "Killed workers")
SCHEDULER_US_PER_UNIT = Measured(202, "202", "Real-time sessions")
SCHEDULER_MB = Measured(73, "73", "Soak")
GRANTS_PER_S = Measured(181, "181 to 192 grants per second", "Leases")
UP_KB_PER_UNIT = Measured(85, "85 KB", "Cost of JSON")
DOWN_KB_PER_UNIT = Measured(128, "128 KB", "Cost of JSON")
MEASURED = (
    *(SESSIONS_PER_EDGE_CORE, EDGE_MB, EDGE_SESSION_MB, JOURNAL_MB_PER_MINUTE),
    *(SCHEDULER_US_PER_UNIT, SCHEDULER_MB, GRANTS_PER_S, UP_KB_PER_UNIT, DOWN_KB_PER_UNIT),
)

# Of the journal in EDGE_SESSION_MB: those sessions were a minute old.
EDGE_SESSION_MB_WITHOUT_JOURNAL = EDGE_SESSION_MB.value - JOURNAL_MB_PER_MINUTE.value
MAX_JOURNAL_MB = 33.6  # --journal-bytes, 32 MiB
SCHEDULERS = 3
ETCD_MEMBERS = 3
# Assumed, above what the store writes: one session changes a handful of keys of some hundred bytes,
# and etcd keeps them until it compacts.
ETCD_REVISIONS_PER_SESSION = 10
ETCD_KB_PER_REVISION = 4.0
ETCD_COMPACTED_MINUTES = 10.0  # as in docs/cluster.md
