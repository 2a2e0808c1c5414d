"""The scheduler's metrics: slots, queue, leases and refusals, counted from the store's changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.kinds import KINDS_BY_NAME, kind_name
from duplane.fabric.monitoring.metrics import (
    OTHER,
    Observed,
    counters,
    gauge,
    gauges,
    histograms,
    new_registry,
)
from duplane.scheduler.quotas import LIMITS, Quotas
from duplane.scheduler.slot_counts import SlotCounts
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    Ticket,
    TicketGone,
    TicketPut,
)

LEASE_EVENTS = (
    *("granted", "claimed", "adopted", "revoked"),
    *(end.name.lower() for end in GrantEnd),
)
WAIT_OUTCOMES = ("granted", "left")
REFUSALS = (
    Reason.INVALID_FIELD,
    Reason.QUEUE_FULL,
    Reason.TENANT_QUOTA,
    Reason.KIND_NOT_SERVED,
    Reason.MODEL_NOT_SERVED,
    Reason.TICKET_CANCELLED,
    Reason.SUPERSEDED,
    Reason.UNAVAILABLE,
)
_WAIT_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1800.0),
)


class SchedulerMetrics:
    """The metrics of one scheduler. Keeps the start of each wait, and the live leases."""

    def __init__(self, state: SchedulerState) -> None:
        self.registry = registry = new_registry("scheduler")
        self._state = state
        self._slots = SlotCounts(state)
        self._since: dict[str, dict[int, float]] = {}  # by pool and order, oldest first
        self._tickets: Counter[tuple[str, str]] = Counter()  # by pool and kind
        self._counted: dict[int, tuple[str, str]] = {}  # pool and kind of each ticket, by order
        self._leases: dict[str, Grant] = {}
        self._waits = histograms(
            registry,
            "duplane_queue_wait_seconds",
            "Time from the request for a slot to its grant, or until the caller left.",
            _WAIT_BUCKETS_S,
            kind=tuple(KINDS_BY_NAME),
            outcome=WAIT_OUTCOMES,
        )
        self._lease_events = counters(
            registry, "duplane_lease_events_total", "Events of leases.", event=LEASE_EVENTS
        )
        self._refusals = counters(
            registry,
            "duplane_lease_requests_refused_total",
            "Requests for a slot that ended without a grant, by the reason that the caller got.",
            reason=REFUSALS,
        )
        self._quota_refusals = counters(
            registry,
            "duplane_tenant_refusals_total",
            "Requests for a slot that were refused with TENANT_QUOTA, by the limit of the tenant.",
            limit=LIMITS,
        )
        Observed(registry, self._observe)
        state.listeners.append(self._on_change)

    def show_quotas(self, quotas: Quotas, ticket_limit: int) -> None:
        """Show what tenants use. Tenants are not named, because their number has no bound."""

        def observe() -> Iterable[Metric]:
            yield gauges(
                "duplane_tenants",
                "Tenants with sessions that hold a slot, and tenants with sessions that wait.",
                ("state",),
                {
                    ("holding",): float(quotas.holding_tenant_count),
                    ("waiting",): float(quotas.waiting_tenant_count),
                },
            )
            yield gauge(
                "duplane_queue_highest_tenant_share",
                "Waiting sessions of the tenant that has most of them, as a share of the limit of"
                " the queue.",
                quotas.highest_waiting_count / ticket_limit,
            )

        Observed(self.registry, observe)

    def refused(self, error: FabricError) -> None:
        """Count a request for a slot that was refused."""
        self._refusals.of(error.reason).inc()
        if error.reason is Reason.TENANT_QUOTA:
            self._quota_refusals.of(error.field.rpartition(".")[2]).inc()

    def _on_change(self, change: Change) -> None:
        match change:
            case TicketPut(ticket=ticket):
                self._on_ticket(ticket)
            case TicketGone(ticket=ticket, is_granted=is_granted):
                self._on_ticket_gone(ticket, is_granted=is_granted)
            case GrantPut(grant=grant):
                self._on_grant(grant)
            case GrantGone(grant=grant, end=end):
                self._leases.pop(grant.claims.lease_id, None)
                self._lease_events.of(end.name.lower()).inc()
            case _:
                pass

    def _on_ticket(self, ticket: Ticket) -> None:
        """Count a new ticket. Count a known ticket again if its pool or kind has changed."""
        key = ticket.request.pool, kind_name(ticket.request.kind)
        counted = self._counted.get(ticket.order)
        if counted and counted != key:
            self._forget(ticket.order)
        if counted != key:
            self._counted[ticket.order] = key
            self._since.setdefault(ticket.request.pool, {})[ticket.order] = self._state.clock()
            self._tickets[key] += 1

    def _forget(self, order: int) -> float:
        """Stop counting a ticket; return when its wait began."""
        key = pool, _ = self._counted.pop(order)
        since = self._since[pool].pop(order)
        if not self._since[pool]:
            del self._since[pool]
        self._tickets[key] -= 1
        if not self._tickets[key]:
            del self._tickets[key]
        return since

    def _on_ticket_gone(self, ticket: Ticket, *, is_granted: bool) -> None:
        kind = kind_name(ticket.request.kind)
        waited_s = self._state.clock() - self._forget(ticket.order)
        self._waits.of(kind, "granted" if is_granted else "left").observe(waited_s)

    def _on_grant(self, grant: Grant) -> None:
        before = self._leases.get(grant.claims.lease_id)
        self._leases[grant.claims.lease_id] = grant
        if before is None:
            self._lease_events.of("granted" if grant.ticket else "adopted").inc()
            if grant.ticket and grant.ticket.order == grant.claims.fencing_number:
                # The slot was granted without a wait, so there was no TicketPut.
                self._waits.of(kind_name(grant.claims.kind), "granted").observe(0.0)
        if grant.ticket and grant.is_claimed and not (before and before.is_claimed):
            self._lease_events.of("claimed").inc()
        if grant.is_revoked and not (before and before.is_revoked):
            self._lease_events.of("revoked").inc()

    # The methods below compute gauges whenever Prometheus reads the metrics.

    def _observe(self) -> Iterable[Metric]:
        pools = {*self._slots.pools, *self._state.expected_pools}
        yield gauges(
            "duplane_slots",
            "Slots of all attached workers, as this scheduler knows them.",
            ("role", "pool", "state"),
            {("scheduler", *key): float(count) for key, count in self._slots.by_state(pools)},
        )
        yield gauges(
            "duplane_workers",
            "Workers by state; only workers that are `ready` get sessions. Those that are `lost`"
            " are no longer attached, and are counted for ten minutes.",
            ("state",),
            {(state,): float(count) for state, count in self._slots.workers_by_state()},
        )
        yield gauges(
            "duplane_queue_tickets",
            "Sessions that wait for a slot.",
            ("pool", "kind"),
            self._ticket_counts(pools),
        )
        yield gauges(
            "duplane_queue_oldest_wait_seconds",
            "Time that the first session in the queue has waited so far.",
            ("pool",),
            self._oldest_waits_s(pools),
        )

    def _ticket_counts(self, pools: set[str]) -> dict[tuple[str, ...], float]:
        counts = {(pool, kind): 0.0 for pool in pools or {""} for kind in KINDS_BY_NAME}
        for (pool, kind), count in self._tickets.items():
            key = (_pool_label(pool, pools), kind)
            counts[key] = counts.get(key, 0.0) + count
        return {**counts}

    def _oldest_waits_s(self, pools: set[str]) -> dict[tuple[str, ...], float]:
        now = self._state.clock()
        waits_s = dict.fromkeys(pools or {""}, 0.0)
        for pool, since in self._since.items():
            label = _pool_label(pool, pools)
            waits_s[label] = max(waits_s.get(label, 0.0), now - next(iter(since.values())))
        return {(pool,): wait_s for pool, wait_s in waits_s.items()}


def _pool_label(pool: str, pools: set[str]) -> str:
    """Return the name of a known pool, else `other`, because callers can send any name."""
    return pool if pool in pools or not pool else OTHER
