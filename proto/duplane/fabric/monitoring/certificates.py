"""A metric of the life of a process's certificates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from duplane.fabric.monitoring.metrics import Observed, gauges

if TYPE_CHECKING:  # a process without TLS does not import it
    from cryptography.x509 import Certificate


def observe_certificates(
    registry: CollectorRegistry, leaves: Mapping[str, Callable[[], Certificate | None]]
) -> None:
    """Add the metric. `leaves` has the present certificate of each use; None without TLS."""

    def observe() -> Iterable[Metric]:
        now = datetime.now(UTC)
        yield gauges(
            "duplane_certificate_life_ratio",
            "Share of the life of the present certificate that is left, by its use; 0 or less "
            "after its end, and +Inf without TLS.",
            ("use",),
            {(use,): life_left(leaf(), now) for use, leaf in leaves.items()},
        )

    Observed(registry, observe)


def life_left(leaf: Certificate | None, now: datetime) -> float:
    """Return the share of a certificate's life that is left; infinite without a certificate."""
    if leaf is None:
        return math.inf
    begin, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    return (end - now) / (end - begin) if end > begin else 0.0
