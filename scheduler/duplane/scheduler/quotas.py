"""Quotas of tenants: what each tenant uses of the fabric, and the check of its limits.

Slots and tickets are counted from the changes of the store, so every scheduler of a fabric counts
those of all edges and schedulers. The time for which slots were held is counted by every scheduler,
too. The store keeps the highest count of a day, if it outlasts this process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

from cachetools import LRUCache
from sortedcontainers import SortedList

from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantGone,
    GrantPut,
    LeaseStore,
    TenantTime,
    TicketGone,
    TicketPut,
    TimePut,
)

_log = logging.getLogger(__name__)

_DAY_S = 86_400
SAVE_INTERVAL_S = 5.0  # so much of the time of a tenant may be lost with the last scheduler
SAVED_STEP_S = 1.0  # a lower difference to the saved time is not worth a write
_MAX_SAVED_COUNT = (
    512  # tenants whose times are saved at one interval; the others wait for the next
)
# Tenants whose time of this day is remembered. The time of the tenant whose last session ended
# longest ago is forgotten first; the store still has it, but is read only at the start.
_MAX_TENANTS = 65_536

# The limits, by the names that refusals and metrics give them.
SESSION_COUNT = "session_count"
WAITING_COUNT = "waiting_count"
DAILY_MINUTES = "daily_minutes"
LIMITS = (SESSION_COUNT, WAITING_COUNT, DAILY_MINUTES)


class _Tenant:
    """The slots and tickets of one tenant.

    They are counted by their orders. So a ticket and its grant count once while both are known, and
    so do the two slots of a session that moves.
    """

    def __init__(self) -> None:
        self.waiting: SortedList[int] = SortedList()
        self.orders: SortedList[int] = SortedList()  # of the tickets, and of those granted
        self.since: dict[str, float] = {}  # when each claimed lease was granted, by lease id
        self._use_counts: Counter[int] = Counter()  # by order

    def add(self, order: int) -> None:
        self._use_counts[order] += 1
        if self._use_counts[order] == 1:
            self.orders.add(order)

    def remove(self, order: int) -> None:
        self._use_counts[order] -= 1
        if not self._use_counts[order]:
            del self._use_counts[order]
            self.orders.remove(order)

    def held_s(self, now: float) -> float:
        """Return how long all present sessions have lasted together, in the present day."""
        midnight = now - now % _DAY_S
        return sum(max(0.0, now - max(since, midnight)) for since in self.since.values())


class Quotas:
    """Counts what tenants use, and refuses requests above their limits.

    The check before a request is enqueued compares with the present counts. Requests that arrive at
    the same time, perhaps at several schedulers, may all pass this check, so it is repeated when
    the store has given the request its order: then only orders below its own count. Every scheduler
    counts the same orders, so exactly as many requests stay as the limit allows.
    """

    def __init__(
        self,
        store: LeaseStore,
        state: SchedulerState,
        waiting_limit: int,
        wall_clock: Callable[[], float],
    ) -> None:
        """`waiting_limit` is the maximum number of waiting tickets of any tenant."""
        self.waiting_limit = waiting_limit
        self._store = store
        self._state = state
        self._wall_clock = wall_clock
        self._tenants: dict[str, _Tenant] = {}  # only tenants with tickets or grants
        self._leases: dict[str, tuple[str, int]] = {}  # tenant and order, by lease id
        self._tickets: dict[int, str] = {}  # tenants, by order
        self._ended = LRUCache[str, TenantTime](_MAX_TENANTS)  # ended sessions of the day
        self._saved = LRUCache[str, TenantTime](_MAX_TENANTS)
        self._unsaved = LRUCache[str, None](_MAX_TENANTS)  # tenants whose time has changed
        state.listeners.append(self._on_change)

    def check(
        self, request: lease_pb2.AcquireLeaseRequest, *, is_returning: bool, may_wait: bool
    ) -> None:
        """Refuse a request above a limit, before it is enqueued.

        With `may_wait`, no slot is free for it. Callers that return with a ticket are accepted
        until the tenant has twice as many, because the scheduler may count their former grants.
        Raises FabricError.
        """
        if not request.tenant_id:
            return
        tenant = self._tenants.get(request.tenant_id) or _Tenant()
        factor = 2 if is_returning else 1
        self._check_counts(request, len(tenant.orders), None, factor)
        if may_wait:
            self._check_counts(request, 0, len(tenant.waiting), factor)
        limits = request.tenant_limits
        if limits.HasField(DAILY_MINUTES) and not is_returning:
            is_met = self.held_s(request.tenant_id) < 60 * limits.daily_minutes
            _require(is_met, DAILY_MINUTES, f"{limits.daily_minutes} minutes are used today")

    def check_order(
        self, request: lease_pb2.AcquireLeaseRequest, order: int, *, is_waiting: bool
    ) -> None:
        """Refuse a new request if the tenant's earlier ones use the limit. Raises FabricError."""
        if tenant := self._tenants.get(request.tenant_id):
            waiting_count = tenant.waiting.bisect_left(order) if is_waiting else None
            self._check_counts(request, tenant.orders.bisect_left(order), waiting_count, 1)

    def _check_counts(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        count: int,
        waiting_count: int | None,
        factor: int,
    ) -> None:
        limits = request.tenant_limits
        if limits.HasField(SESSION_COUNT):
            text = f"the tenant holds or waits for {limits.session_count} slots already"
            _require(count < factor * limits.session_count, SESSION_COUNT, text)
        if waiting_count is not None:
            limit = self.waiting_limit
            if limits.HasField(WAITING_COUNT):
                limit = min(limit, limits.waiting_count)
            text = f"{limit} requests of the tenant wait already"
            _require(waiting_count < factor * limit, WAITING_COUNT, text)

    def held_s(self, tenant_id: str) -> float:
        """Return for how long the tenant has held slots today."""
        now = self._wall_clock()
        tenant = self._tenants.get(tenant_id)
        return self._ended_today(tenant_id, now) + (tenant.held_s(now) if tenant else 0.0)

    @property
    def waiting_tenant_count(self) -> int:
        """The number of tenants with tickets."""
        return sum(bool(tenant.waiting) for tenant in self._tenants.values())

    @property
    def holding_tenant_count(self) -> int:
        """The number of tenants with sessions."""
        return sum(bool(tenant.since) for tenant in self._tenants.values())

    @property
    def highest_waiting_count(self) -> int:
        """The number of tickets of the tenant that has most of them."""
        return max((len(tenant.waiting) for tenant in self._tenants.values()), default=0)

    async def run(self) -> NoReturn:
        """Save the times of tenants in the store, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            try:
                await self.save()
            except FabricError as error:  # the times are saved when the store answers again
                _log.debug("times of tenants are not saved: %s", error)

    async def save(self) -> None:
        """Save the times of some tenants that have changed. Raises FabricError."""
        tenant_ids = list(itertools.islice(self._unsaved, _MAX_SAVED_COUNT))
        await asyncio.gather(*map(self._save_time, tenant_ids))

    async def _save_time(self, tenant_id: str) -> None:
        today = _day(self._wall_clock())
        time, saved = self._ended.get(tenant_id), self._saved.get(tenant_id)
        saved_s = saved.held_s if saved and saved.day == today else 0.0
        if time and time.day == today and time.held_s >= saved_s + SAVED_STEP_S:
            await self._store.save_time(time)
        if self._ended.get(tenant_id) is time:
            self._unsaved.pop(tenant_id, None)

    def _on_saved(self, time: TenantTime) -> None:
        """Take over a time of today that is higher than the own one."""
        self._saved[time.tenant_id] = time
        now = self._wall_clock()
        if time.day == _day(now) and time.held_s > self._ended_today(time.tenant_id, now):
            self._ended[time.tenant_id] = time

    def _ended_today(self, tenant_id: str, now: float) -> float:
        time = self._ended.get(tenant_id)
        return time.held_s if time and time.day == _day(now) else 0.0

    def _on_change(self, change: Change) -> None:
        match change:
            case TicketPut(ticket=ticket):
                self._forget_ticket(ticket.order)
                if tenant_id := ticket.request.tenant_id:
                    self._tickets[ticket.order] = tenant_id
                    tenant = self._tenants.setdefault(tenant_id, _Tenant())
                    tenant.add(ticket.order)
                    tenant.waiting.add(ticket.order)
            case TicketGone(ticket=ticket):
                self._forget_ticket(ticket.order)
            case GrantPut(grant=grant):
                self._on_grant(grant)
            case GrantGone(grant=grant):
                self._on_grant_gone(grant)
            case TimePut(time=time):
                self._on_saved(time)
            case _:
                pass

    def _forget_ticket(self, order: int) -> None:
        if tenant_id := self._tickets.pop(order, None):
            tenant = self._tenants[tenant_id]
            tenant.waiting.remove(order)
            tenant.remove(order)
            self._drop_if_idle(tenant_id)

    def _on_grant(self, grant: Grant) -> None:
        claims = grant.claims
        tenant_id = tenant_of(grant)
        if not tenant_id:
            return
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        if claims.lease_id not in self._leases:
            order = grant.ticket.order if grant.ticket else claims.fencing_number
            self._leases[claims.lease_id] = tenant_id, order
            tenant.add(order)
        if grant.is_claimed:
            tenant.since.setdefault(claims.lease_id, self._granted_at(claims))

    def _on_grant_gone(self, grant: Grant) -> None:
        lease_id = grant.claims.lease_id
        if lease_id not in self._leases:
            return
        tenant_id, order = self._leases.pop(lease_id)
        tenant = self._tenants[tenant_id]
        since = tenant.since.pop(lease_id, None)
        if since is not None:
            now = self._wall_clock()
            held_s = max(0.0, now - max(since, now - now % _DAY_S))
            ended_s = self._ended_today(tenant_id, now) + held_s
            self._ended[tenant_id] = TenantTime(tenant_id, _day(now), ended_s)
            self._unsaved[tenant_id] = None
        tenant.remove(order)
        self._drop_if_idle(tenant_id)

    def _drop_if_idle(self, tenant_id: str) -> None:
        if not self._tenants[tenant_id].orders:
            del self._tenants[tenant_id]

    def _granted_at(self, claims: lease_pb2.LeaseClaims) -> float:
        """Return the time of a grant, which its claims contain; now for an adopted grant."""
        now = self._wall_clock()
        if not claims.HasField("expire_time"):
            return now
        granted_at = claims.expire_time.ToNanoseconds() / 1e9 - to_seconds(claims.claim_timeout)
        return min(now, granted_at)


def tenant_of(grant: Grant) -> str:
    """Return the tenant of a grant; empty if there is none."""
    return grant.ticket.request.tenant_id if grant.ticket else grant.claims.tenant_id


def waiting_limit(ticket_limit: int, share: float) -> int:
    """Return how many tickets of one tenant may wait, if it may have `share` of the queue."""
    return max(1, math.floor(ticket_limit * share))


def _require(is_met: bool, limit: str, text: str) -> None:
    if not is_met:
        raise FabricError(Reason.TENANT_QUOTA, text, field=f"tenant_limits.{limit}")


def _day(wall_s: float) -> int:
    """Return the number of a day (UTC), from 1970."""
    return int(wall_s // _DAY_S)
