"""The state of the fabric in one scheduler: the content of the store, indexed for `policy/`.

Only changes of the store modify this state, so every scheduler of a fabric decides from the same
state. In addition, each scheduler reserves the slots and tickets of its grants that are on their
way to the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import assert_never

from cachetools import LRUCache

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.lost_workers import LostWorkers
from duplane.scheduler.policy.fifo import FifoQueue, QueueEntry
from duplane.scheduler.policy.forecast import Demand, Waits, forecast
from duplane.scheduler.policy.hold_times import HoldTimes
from duplane.scheduler.policy.needs import Needs, demand_of, needs_of
from duplane.scheduler.policy.placement import Candidate, SlotIndex, avoidance_end, next_grant
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    Ticket,
    TicketGone,
    TicketPut,
    Worker,
    WorkerGone,
    WorkerPut,
)

_PUBLISHED_QUEUE_COUNT = 4  # queues that one call of `publish_positions` looks at
_FORECAST_AGE_S = 1.0  # a forecast is replaced after this time
# If a pool has more queues than this number, or more groups of workers with different labels, each
# demand gets a forecast of its own, which simulates at most this number of groups.
_MAX_LABEL_SETS = 32
_MAX_FORECASTS = 1024  # kept for a pool with many label sets


_Demanded = tuple[Needs, lease_pb2.SessionKind]


class _Forecast:
    """The estimated waiting times in one pool at one moment, by needs and kind of the tickets."""

    def __init__(
        self, revision: int, now: float, waits: Mapping[_Demanded, Waits], share: float = 1.0
    ) -> None:
        """`share` is the simulated fraction of the slots; the tickets are reduced in proportion."""
        self._revision = revision
        self._deadline = now + _FORECAST_AGE_S
        self._is_exact = all(one.is_exact for one in waits.values())
        self.waits = waits
        self.share = share

    def is_young(self, now: float) -> bool:
        """True if the forecast is younger than 1 s."""
        return now < self._deadline

    def is_fresh(self, revision: int, now: float) -> bool:
        """True if the forecast is younger than 1 s and, if it is exact, nothing has changed."""
        return self.is_young(now) and (revision == self._revision or not self._is_exact)


class _Pool:
    """The tickets and the workers of one pool."""

    def __init__(self) -> None:
        self.queues: dict[Needs, FifoQueue] = {}  # only queues with tickets
        self.slots = SlotIndex()
        self.forecast: _Forecast | None = None
        # One forecast for each demand; used if `has_many_label_sets`.
        self.forecasts = LRUCache[_Demanded, _Forecast](_MAX_FORECASTS)
        self.last_order = 0

    @property
    def has_many_label_sets(self) -> bool:
        """True if a forecast of all demands together would take too long."""
        return max(len(self.queues), self.slots.group_count) > _MAX_LABEL_SETS


class SchedulerState:
    """Workers, tickets and grants.

    Each of `listeners` is called after every change. Each of `position_listeners` is called with
    queue entries that moved up, one portion for each call of `publish_positions`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.revision = 0
        self.return_count = 0  # number of tickets that were put ahead of others
        self.workers: dict[str, Worker] = {}
        self.lost_workers = LostWorkers(clock)
        self.tickets: dict[int, Ticket] = {}  # by order
        self.grants: dict[str, Grant] = {}  # by lease id, oldest first
        self.requests: dict[str, Ticket] = {}  # tickets that wait or have a grant, by request id
        self.hold_times = HoldTimes()
        self.listeners: list[Callable[[Change], None]] = []
        self.position_listeners: list[Callable[[Sequence[QueueEntry]], None]] = []
        self._pools: dict[str, _Pool] = {}
        self._moved: dict[FifoQueue, None] = {}  # queues with entries to publish, in turn
        self._slots: dict[str, dict[int, Grant]] = {}  # by worker id
        self._grants_of_order: dict[int, dict[str, Grant]] = {}  # by ticket and lease id
        self._reserved_slots: dict[str, set[int]] = {}  # by worker id
        self._reserved_orders: set[int] = set()
        self._void_numbers: dict[str, dict[int, int]] = {}  # by worker id and slot
        self._worker_since: dict[str, float] = {}
        self._grant_since: dict[str, float] = {}

    def apply(self, change: Change) -> None:
        """Apply one change of the store."""
        self.revision = max(self.revision, change.revision)
        match change:
            case WorkerPut(worker=worker):
                self._put_worker(worker)
            case WorkerGone(worker=worker):
                self._remove_worker(worker)
            case TicketPut(ticket=ticket):
                self._put_ticket(ticket)
            case TicketGone(ticket=ticket, is_granted=is_granted):
                self._remove_ticket(ticket, is_granted)
            case GrantPut(grant=grant):
                self._put_grant(grant)
            case GrantGone(grant=grant, end=end):
                self._remove_grant(grant, end)
            case _:
                assert_never(change)
        for listener in self.listeners:
            listener(change)

    def publish_positions(self, limit: int) -> bool:
        """Publish entries that moved up: at most `limit` of each of the next few queues.

        Returns False if no entries are left.
        """
        for queue in list(itertools.islice(self._moved, _PUBLISHED_QUEUE_COUNT)):
            del self._moved[queue]
            moved = queue.next_moved(limit)
            if queue.has_moved:
                self._moved[queue] = None
            if moved:
                for listener in self.position_listeners:
                    listener(moved)
        return bool(self._moved)

    @property
    def waiting_pools(self) -> Sequence[str]:
        """The pools in which tickets wait."""
        return [name for name, pool in self._pools.items() if pool.queues]

    def next_grant(self, pool: str) -> tuple[Ticket, Candidate] | None:
        """Return the ticket of a pool to grant next, and the worker; None if no slot is free."""
        known = self._pools.get(pool)
        if known is None or not known.slots.has_free:
            return None
        queues = sorted(known.slots.grantable(known.queues), key=_first_order)
        now = self.clock()
        reserved = self._reserved_orders
        proposals = (next_grant(queue, known.slots, now, reserved) for queue in queues)
        return next((proposal for proposal in proposals if proposal), None)

    def avoidance_left_s(self, after: float) -> float | None:
        """Return the seconds until a ticket stops avoiding a worker with a free slot.

        Tickets that stopped at the time `after` or before do not count. The result is negative if
        the ticket has stopped meanwhile. Returns None if there is no such ticket.
        """
        reserved = self._reserved_orders
        ends = (
            avoidance_end(queue, pool.slots, after, reserved)
            for pool in self._pools.values()
            if pool.queues and pool.slots.has_free
            for queue in pool.slots.grantable(pool.queues)
        )
        end = min((end for end in ends if end is not None), default=None)
        return None if end is None else end - self.clock()

    def free_candidate(self, request: lease_pb2.AcquireLeaseRequest) -> Candidate | None:
        """Return the worker whose slot a new request gets now, or None if it has to wait."""
        pool = self._pools.get(request.pool)
        if pool is None or pool.queues:
            return None
        return pool.slots.best(request, needs_of(request), may_avoid=True)

    def reserve(self, worker_id: str, slot: int, order: int | None = None) -> None:
        """Exclude a slot, and the ticket with order number `order`, until `unreserve` is called."""
        self._reserved_slots.setdefault(worker_id, set()).add(slot)
        if order is not None:
            self._reserved_orders.add(order)
        self._update_candidate(worker_id)

    def unreserve(self, worker_id: str, slot: int, order: int | None = None) -> None:
        """End a reservation."""
        slots = self._reserved_slots[worker_id]
        slots.discard(slot)
        if not slots:
            del self._reserved_slots[worker_id]
        if order is not None:
            self._reserved_orders.discard(order)
        if self.grant_of(worker_id, slot) is None:
            self._update_candidate(worker_id)

    def entry(self, ticket: Ticket) -> QueueEntry | None:
        """Return the queue entry of a ticket, or None if the ticket does not wait."""
        queue = self._queue(ticket)
        return queue.get(ticket.order) if queue else None

    def queue_length(self, ticket: Ticket) -> int:
        """Return how many tickets wait in the same queue as `ticket`."""
        return len(self._queue(ticket) or ())

    def serves(self, request: lease_pb2.AcquireLeaseRequest) -> bool:
        """True if an attached worker, draining or not, meets the kind and needs of a request."""
        pool = self._pools.get(request.pool)
        return bool(pool) and request.kind in pool.slots.attached_kinds(needs_of(request))

    def has_model(self, request: lease_pb2.AcquireLeaseRequest) -> bool:
        """True if a worker that meets the other needs has the model that a request names."""
        pool = self._pools.get(request.pool)
        return bool(pool) and pool.slots.has_model(needs_of(request))

    def ambiguous_models(self, request: lease_pb2.AcquireLeaseRequest) -> Sequence[str]:
        """Return the models that are served, if they are several and the request names another."""
        pool = self._pools.get(request.pool)
        return pool.slots.ambiguous_models(needs_of(request)) if pool else ()

    def grant_of(self, worker_id: str, slot: int) -> Grant | None:
        """Return the grant of a slot."""
        return self._slots.get(worker_id, {}).get(slot)

    def void_number(self, worker_id: str, slot: int) -> int:
        """Return the fencing number of the slot's last grant that ended unclaimed, or 0.

        The slot is not granted until the worker reports that it has seen this number.
        """
        return self._void_numbers.get(worker_id, {}).get(slot, 0)

    def grants_of_order(self, order: int) -> Collection[Grant]:
        """Return the grants that were made for a ticket."""
        return tuple(self._grants_of_order.get(order, {}).values())

    def grant_of_request(self, request_id: str) -> Grant | None:
        """Return the grant of a request."""
        ticket = self.requests.get(request_id)
        grants = self.grants_of_order(ticket.order) if ticket else ()
        return next((one for one in grants if _is_of_request(one, request_id)), None)

    def attached_s(self, worker_id: str) -> float:
        """Return how long a worker has been registered."""
        return self.clock() - self._worker_since[worker_id]

    def held_s(self, lease_id: str) -> float:
        """Return how long ago a lease was granted, or adopted from a report."""
        return self.clock() - self._grant_since[lease_id]

    def wait_s(self, ticket: Ticket) -> float | None:
        """Return the estimated wait of a ticket, or None while no slot serves the ticket."""
        pool = self._pools[ticket.request.pool]
        now = self.clock()
        needs = needs_of(ticket.request)
        kind = ticket.request.kind
        known = pool.forecast
        rank = pool.queues[needs].rank_in_kind(ticket)
        if pool.has_many_label_sets:
            known = pool.forecasts.get((needs, kind))
            if known is None or not known.is_young(now):
                known = pool.forecasts[needs, kind] = self._forecast_alone(pool, needs, kind, now)
            return known.waits[needs, kind].wait_s(int(rank * known.share))
        is_known = known is not None and (needs, kind) in known.waits
        if known is None or not is_known or not known.is_fresh(self.revision, now):
            known = pool.forecast = _Forecast(self.revision, now, self._forecast(pool, now))
        return known.waits[needs, kind].wait_s(rank)

    def _forecast_alone(
        self, pool: _Pool, needs: Needs, kind: lease_pb2.SessionKind, now: float
    ) -> _Forecast:
        """Forecast the waits of one demand as if no other demand used its slots."""
        supplies, share = pool.slots.some_supplies(needs, kind, _MAX_LABEL_SETS)
        orders = pool.queues[needs].orders_by_kind[kind]
        demand = Demand(kind, orders, range(len(supplies)))
        (waits,) = forecast([demand], supplies, self.hold_times, now)
        return _Forecast(self.revision, now, {(needs, kind): waits}, share)

    def _forecast(self, pool: _Pool, now: float) -> Mapping[_Demanded, Waits]:
        demands = {
            (needs, kind): Demand(kind, orders, pool.slots.supplies_for(needs, kind), line=needs)
            for needs, queue in pool.queues.items()
            for kind, orders in queue.orders_by_kind.items()
        }
        waits = forecast(list(demands.values()), pool.slots.supplies(), self.hold_times, now)
        return dict(zip(demands, waits, strict=True))

    def _queue(self, ticket: Ticket) -> FifoQueue | None:
        pool = self._pools.get(ticket.request.pool)
        return pool.queues.get(needs_of(ticket.request)) if pool else None

    def _put_worker(self, worker: Worker) -> None:
        if worker.worker_id not in self.workers:
            self.lost_workers.registered(worker)
        self.workers[worker.worker_id] = worker
        self._worker_since.setdefault(worker.worker_id, self.clock())
        self._update_candidate(worker.worker_id)

    def _remove_worker(self, worker: Worker) -> None:
        attached_s = self.attached_s(worker.worker_id)
        del self.workers[worker.worker_id], self._worker_since[worker.worker_id]
        self.lost_workers.registration_ended(worker, attached_s, self.workers.values())
        self._void_numbers.pop(worker.worker_id, None)
        pool = worker.register.pool
        self._pools[pool].slots.remove(worker.worker_id)
        self._drop_empty(pool)

    def _put_ticket(self, ticket: Ticket) -> None:
        if former := self.tickets.get(ticket.order):
            self.requests.pop(former.request.request_id, None)
            if demand_of(former.request) != demand_of(ticket.request):
                self._leave_queue(former)  # the ticket now waits in another queue
        self.tickets[ticket.order] = ticket
        self.requests[ticket.request.request_id] = ticket
        pool = self._pool(ticket.request.pool)
        needs = needs_of(ticket.request)
        pool.queues.setdefault(needs, FifoQueue(needs)).put(ticket, self.clock())
        self.return_count += ticket.order < pool.last_order
        pool.last_order = max(pool.last_order, ticket.order)

    def _remove_ticket(self, ticket: Ticket, is_granted: bool) -> None:
        del self.tickets[ticket.order]
        if not is_granted:
            self.requests.pop(ticket.request.request_id, None)
        self._leave_queue(ticket)

    def _leave_queue(self, ticket: Ticket) -> None:
        queues = self._pools[ticket.request.pool].queues
        needs = needs_of(ticket.request)
        queue = queues[needs]
        queue.remove(ticket.order)
        self._moved[queue] = None
        if not len(queue):
            del queues[needs], self._moved[queue]
        self._drop_empty(ticket.request.pool)

    def _put_grant(self, grant: Grant) -> None:
        claims = grant.claims
        is_new = claims.lease_id not in self.grants
        self.grants[claims.lease_id] = grant
        if grant.ticket:
            self.requests[grant.ticket.request.request_id] = grant.ticket
            same = self._grants_of_order.setdefault(grant.ticket.order, {})
            same[claims.lease_id] = grant
        self._grant_since.setdefault(claims.lease_id, self.clock())
        self._slots.setdefault(claims.worker_id, {})[claims.slot] = grant
        if is_new:
            self._update_candidate(claims.worker_id)

    def _remove_grant(self, grant: Grant, end: GrantEnd) -> None:
        claims = grant.claims
        if end is GrantEnd.RELEASED and grant.is_claimed and grant.ticket:
            self.hold_times.add(claims.kind, self.held_s(claims.lease_id))
        del self.grants[claims.lease_id], self._grant_since[claims.lease_id]
        if grant.ticket:
            self.requests.pop(grant.ticket.request.request_id, None)
            self._forget_order(grant.ticket.order, claims.lease_id)
        slots = self._slots[claims.worker_id]
        del slots[claims.slot]
        if not slots:
            del self._slots[claims.worker_id]
        if end in (GrantEnd.RETURNED, GrantEnd.EXPIRED):
            void_numbers = self._void_numbers.setdefault(claims.worker_id, {})
            void_numbers[claims.slot] = claims.fencing_number
        self._update_candidate(claims.worker_id)

    def _forget_order(self, order: int, lease_id: str) -> None:
        same = self._grants_of_order[order]
        del same[lease_id]
        if not same:
            del self._grants_of_order[order]

    def _update_candidate(self, worker_id: str) -> None:
        if worker := self.workers.get(worker_id):
            grants = self._slots.get(worker_id, {})
            void_numbers = self._void_numbers.get(worker_id, {})
            reserved = self._reserved_slots.get(worker_id, ())
            candidate = Candidate.of(worker, grants, void_numbers, self._grant_since, reserved)
            self._pool(worker.register.pool).slots.put(candidate)

    def _pool(self, name: str) -> _Pool:
        """Return a pool, which is new if it has no tickets and workers yet."""
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = _Pool()
        return pool

    def _drop_empty(self, name: str) -> None:
        """Delete a pool without tickets and workers, because callers can send any pool name."""
        pool = self._pools[name]
        if not pool.queues and not len(pool.slots):
            del self._pools[name]


def _first_order(queue: FifoQueue) -> int:
    return queue.first_order


def _is_of_request(grant: Grant, request_id: str) -> bool:
    return grant.ticket is not None and grant.ticket.request.request_id == request_id
