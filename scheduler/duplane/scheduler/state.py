"""The state of the fabric in one scheduler: the content of the store, indexed for `policy/`.

Only changes of the store modify this state, so every scheduler of a fabric decides from the same
state. In addition, each scheduler reserves the slots and tickets of its grants that are on their
way to the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import assert_never

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.lost_workers import LostWorkers
from duplane.scheduler.policy.fair_queue import FairQueue, QueueEntry
from duplane.scheduler.policy.hold_times import HoldTimes
from duplane.scheduler.policy.needs import demand_of, needs_of
from duplane.scheduler.policy.placement import Candidate, avoidance_end
from duplane.scheduler.pool import Pool
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    Ticket,
    TicketGone,
    TicketPut,
    TimePut,
    Worker,
    WorkerGone,
    WorkerPut,
)

_PUBLISHED_QUEUE_COUNT = 4  # queues that one call of `publish_positions` looks at


class SchedulerState:
    """Workers, tickets and grants.

    Each of `listeners` is called after every change. Each of `position_listeners` is called with
    queue entries that moved up, one portion for each call of `publish_positions`. Each of
    `unreachable_listeners` is called with the id of a worker that a caller could not reach.
    """

    def __init__(self, clock: Callable[[], float], pools: Iterable[str] = ()) -> None:
        """`pools` may have no workers for a time; their sessions wait meanwhile."""
        self.clock = clock
        self.expected_pools = frozenset(pools)
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
        self.unreachable_listeners: list[Callable[[str], None]] = []
        self._pools: dict[str, Pool] = {}
        self._moved: dict[FairQueue, None] = {}  # queues with entries to publish, in turn
        self._slots: dict[str, dict[int, Grant]] = {}  # by worker id
        self._grants_of_order: dict[int, dict[str, Grant]] = {}  # by ticket and lease id
        self._reserved_slots: dict[str, set[int]] = {}  # by worker id
        self._reserved_orders: set[int] = set()
        self._suspected: dict[str, int] = {}  # epochs of workers that may be unreachable, by id
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
            case TimePut():
                pass  # only quotas use it
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
        return known.next_grant(self.clock(), self._reserved_orders) if known else None

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

    def report_unreachable(self, worker_id: str) -> None:
        """Tell the listeners that a caller could not reach a worker; the id may be unknown."""
        for listener in self.unreachable_listeners:
            listener(worker_id)

    def suspect(self, worker_id: str, epoch: int) -> None:
        """Exclude the slots of a registration until `trust` is called."""
        self._suspected[worker_id] = epoch
        self._update_candidate(worker_id)

    def trust(self, worker_id: str, epoch: int) -> None:
        """End the exclusion of a registration."""
        if self._suspected.get(worker_id) == epoch:
            del self._suspected[worker_id]
            self._update_candidate(worker_id)

    def entry(self, ticket: Ticket) -> QueueEntry | None:
        """Return the queue entry of a ticket, or None if the ticket does not wait."""
        queue = self._queue(ticket)
        return queue.get(ticket.order) if queue else None

    def queue_length(self, ticket: Ticket) -> int:
        """Return how many tickets wait in the same queue as `ticket`."""
        return len(self._queue(ticket) or ())

    def may_wait(self, request: lease_pb2.AcquireLeaseRequest) -> bool:
        """True if an attached worker serves a request, or if a worker may attach that does."""
        if not self.workers or self.serves(request):
            return True
        pool = self._pools.get(request.pool)
        has_workers = pool is not None and pool.slots.group_count > 0
        return request.pool in self.expected_pools and not has_workers

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
        return pool.wait_s(ticket, self.hold_times, self.revision, self.clock())

    def _queue(self, ticket: Ticket) -> FairQueue | None:
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
        self.return_count += ticket.order < pool.last_order
        pool.put(ticket, self.clock())

    def _remove_ticket(self, ticket: Ticket, is_granted: bool) -> None:
        del self.tickets[ticket.order]
        if not is_granted:
            self.requests.pop(ticket.request.request_id, None)
        self._leave_queue(ticket)

    def _leave_queue(self, ticket: Ticket) -> None:
        queue = self._pools[ticket.request.pool].remove(ticket)
        self._moved[queue] = None
        if not len(queue):
            del self._moved[queue]
        self._drop_empty(ticket.request.pool)

    def _put_grant(self, grant: Grant) -> None:
        claims = grant.claims
        is_new = claims.lease_id not in self.grants
        self.grants[claims.lease_id] = grant
        if grant.ticket:
            self.requests[grant.ticket.request.request_id] = grant.ticket
            same = self._grants_of_order.setdefault(grant.ticket.order, {})
            same[claims.lease_id] = grant
        if is_new and grant.ticket and (pool := self._pools.get(grant.ticket.request.pool)):
            self._moved |= dict.fromkeys(pool.note_turn(grant.ticket, claims.fencing_number))
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
            if self._suspected.get(worker_id) == worker.epoch:
                worker = replace(worker, is_unreachable=True)
            grants = self._slots.get(worker_id, {})
            void_numbers = self._void_numbers.get(worker_id, {})
            reserved = self._reserved_slots.get(worker_id, ())
            candidate = Candidate.of(worker, grants, void_numbers, self._grant_since, reserved)
            self._pool(worker.register.pool).slots.put(candidate)

    def _pool(self, name: str) -> Pool:
        """Return a pool, which is new if it has no tickets and workers yet."""
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = Pool()
        return pool

    def _drop_empty(self, name: str) -> None:
        """Delete a pool without tickets and workers, because callers can send any pool name."""
        pool = self._pools[name]
        if not pool.queues and not len(pool.slots):
            del self._pools[name]


def _is_of_request(grant: Grant, request_id: str) -> bool:
    return grant.ticket is not None and grant.ticket.request.request_id == request_id
