"""One pool of workers: its tickets in the order of their turns, its slots, and forecasts of waits.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cachetools import LRUCache

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.fair_queue import FairQueue
from duplane.scheduler.policy.forecast import Demand, Ranks, Waits, forecast
from duplane.scheduler.policy.hold_times import HoldTimes
from duplane.scheduler.policy.needs import Needs, needs_of
from duplane.scheduler.policy.placement import Candidate, SlotIndex, next_grant
from duplane.scheduler.policy.turns import Turns, place
from duplane.scheduler.store.base import Ticket

_FORECAST_AGE_S = 1.0  # a forecast is replaced after this time
# If a pool has more queues than this number, or more groups of workers with different labels, each
# demand gets a forecast of its own, which simulates at most this number of groups.
_MAX_LABEL_SETS = 32
_MAX_TENANTS = 16_384  # whose last grant in a pool is known
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


class _Ranks:
    """The ranks of some tickets among those of a pool."""

    def __init__(self, some: Turns, pool: Turns) -> None:
        self._some = some
        self._pool = pool

    def __len__(self) -> int:
        return len(self._some)

    def __getitem__(self, index: int, /) -> int:
        return self._pool.rank(self._some[index])


class Pool:
    """The tickets and the workers of one pool."""

    def __init__(self) -> None:
        self.queues: dict[Needs, FairQueue] = {}  # only queues with tickets
        # The fencing number of the last grant of each tenant. A forgotten tenant may get one turn
        # too early.
        self._last_numbers = LRUCache[str, int](_MAX_TENANTS)
        self._turns = Turns(self._last_numbers)  # of all queues together
        self.slots = SlotIndex()
        self._whole_forecast: _Forecast | None = None
        # One forecast for each demand; used if `_has_many_label_sets`.
        self._forecasts = LRUCache[_Demanded, _Forecast](_MAX_FORECASTS)
        self.last_order = 0

    @property
    def _has_many_label_sets(self) -> bool:
        """True if a forecast of all demands together would take too long."""
        return max(len(self.queues), self.slots.group_count) > _MAX_LABEL_SETS

    def put(self, ticket: Ticket, now: float) -> None:
        """Add a ticket, or replace the ticket with the same order number and demand."""
        needs = needs_of(ticket.request)
        if needs not in self.queues:
            self.queues[needs] = FairQueue(needs, self._last_numbers)
        if ticket.order in self._turns:
            self._turns.remove(ticket.order)
        self._turns.add(ticket)
        self.queues[needs].put(ticket, now)
        self.last_order = max(self.last_order, ticket.order)

    def remove(self, ticket: Ticket) -> FairQueue:
        """Remove a ticket; return its former queue."""
        needs = needs_of(ticket.request)
        queue = self.queues[needs]
        queue.remove(ticket.order)
        self._turns.remove(ticket.order)
        if not len(queue):
            del self.queues[needs]
        return queue

    def note_turn(self, ticket: Ticket, fencing_number: int) -> Sequence[FairQueue]:
        """Record that the tenant of a granted ticket has had its turn.

        The grant of a ticket that has returned is no turn. Returns the queues whose `next_moved`
        has entries to examine.
        """
        tenant_id = place(ticket)
        if tenant_id is None:
            return ()
        last_number = self._last_numbers.get(tenant_id, 0)
        self._last_numbers[tenant_id] = max(fencing_number, last_number)
        self._turns.renew(tenant_id)
        return [queue for queue in self.queues.values() if queue.renew(tenant_id)]

    def next_grant(self, now: float, reserved: Collection[int]) -> tuple[Ticket, Candidate] | None:
        """Return the ticket to grant next, and the worker; None if no slot is free."""
        if not self.slots.has_free:
            return None
        queues = self.slots.grantable(self.queues)
        if len(queues) > 1:
            queues = sorted(queues, key=lambda queue: self._first_rank(queue, reserved))
        proposals = (next_grant(queue, self.slots, now, reserved) for queue in queues)
        return next((proposal for proposal in proposals if proposal), None)

    def wait_s(self, ticket: Ticket, times: HoldTimes, revision: int, now: float) -> float | None:
        """Return the estimated wait of a ticket, or None while no slot serves the ticket."""
        needs, kind = needs_of(ticket.request), ticket.request.kind
        known = self._whole_forecast
        rank = self.queues[needs].rank_in_kind(ticket)
        if self._has_many_label_sets:
            known = self._forecasts.get((needs, kind))
            if known is None or not known.is_young(now):
                known = self._forecast_alone(needs, kind, times, revision, now)
                self._forecasts[needs, kind] = known
            return known.waits[needs, kind].wait_s(int(rank * known.share))
        is_known = known is not None and (needs, kind) in known.waits
        if known is None or not is_known or not known.is_fresh(revision, now):
            known = self._whole_forecast = _Forecast(revision, now, self._forecast(times, now))
        return known.waits[needs, kind].wait_s(rank)

    def _forecast_alone(
        self,
        needs: Needs,
        kind: lease_pb2.SessionKind,
        times: HoldTimes,
        revision: int,
        now: float,
    ) -> _Forecast:
        """Forecast the waits of one demand as if no other demand used its slots."""
        supplies, share = self.slots.some_supplies(needs, kind, _MAX_LABEL_SETS)
        demand = Demand(kind, self._ranks(self.queues[needs], kind), range(len(supplies)))
        (waits,) = forecast([demand], supplies, times, now)
        return _Forecast(revision, now, {(needs, kind): waits}, share)

    def _forecast(self, times: HoldTimes, now: float) -> Mapping[_Demanded, Waits]:
        demands = {
            (needs, kind): Demand(
                kind, self._ranks(queue, kind), self.slots.supplies_for(needs, kind), line=needs
            )
            for needs, queue in self.queues.items()
            for kind in queue.turns_by_kind
        }
        waits = forecast(list(demands.values()), self.slots.supplies(), times, now)
        return dict(zip(demands, waits, strict=True))

    def _first_rank(self, queue: FairQueue, reserved: Collection[int]) -> int:
        """Return the rank in the pool of the first ticket of a queue that is not `reserved`."""
        order = queue.first_order(reserved)
        return len(self._turns) if order is None else self._turns.rank(order)

    def _ranks(self, queue: FairQueue, kind: lease_pb2.SessionKind) -> Ranks:
        """Return the ranks in the pool of the tickets of one kind."""
        return _Ranks(queue.turns_by_kind[kind], self._turns)
