"""Chooses the next ticket of a pool, and the worker whose slot the ticket gets. Pure.

A pool has one queue for each set of needs. Each queue is strictly in the order of `turns`, with two
exceptions: a ticket is passed over if no worker can serve its kind, or, for a limited time, if its
caller could not reach the worker with the free slot. A slot that meets the needs of several queues
goes to the ticket that comes first in the order of the whole pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sortedcontainers import SortedList

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.incarnations import public_incarnation
from duplane.scheduler.policy.fair_queue import FairQueue
from duplane.scheduler.policy.forecast import Supply
from duplane.scheduler.policy.needs import Labels, Needs, labels_of, model_of, with_model
from duplane.scheduler.store.base import Grant, Ticket, Worker

# Maximum number of tickets that are skipped because they avoid the workers with free slots.
_MAX_PASSED_OVER = 32
_Rank = tuple[int, int, int, str]  # the worker with the lowest rank is used first
_Ability = tuple[frozenset[lease_pb2.SessionKind], Labels]
_Held = tuple[int, lease_pb2.SessionKind, float]  # slot, kind of its session, time of its grant


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """The properties of a worker that placement needs. Compared by identity."""

    worker: Worker
    free_slots: tuple[int, ...]  # longest unused first
    last_number: int  # the highest fencing number of its slots, granted or reported
    is_able: bool  # at least one slot can be granted, now or later
    idle_count: int  # usable slots without a grant; 0 while the worker takes no sessions
    held: frozenset[_Held]  # usable slots with a grant; none while the worker takes no sessions
    ability: _Ability  # the kinds of session that the worker serves, and its labels

    @classmethod
    def of(
        cls,
        worker: Worker,
        grants: Mapping[int, Grant],
        void_numbers: Mapping[int, int],
        granted_at: Mapping[str, float],
        reserved: Collection[int] = (),
    ) -> Candidate:
        """Make a candidate from a registration and the state of its slots.

        `void_numbers` has, by slot, the fencing number of a grant that ended unclaimed. The worker
        may nevertheless have accepted the lease of this grant, and the report of the worker may
        still be on its way. So the slot counts as free only after the worker reports that it has
        seen this number. `granted_at` has the times of the grants, by lease id. `reserved` has the
        slots whose grant is on its way to the store.
        """
        is_leaving = worker.is_draining or worker.is_drain_requested
        free: list[tuple[int, int]] = []
        held: set[_Held] = set()
        last_number = idle_count = 0
        for report in worker.slots:
            slot = report.slot
            number = report.fencing_number
            grant = grants.get(report.slot)
            last_number = max(last_number, number, grant.claims.fencing_number if grant else 0)
            if is_leaving or report.state == registry_pb2.SLOT_STATE_BROKEN:
                continue
            if grant:
                held.add((slot, grant.claims.kind, granted_at[grant.claims.lease_id]))
                continue
            if report.is_withheld:
                continue
            idle_count += 1
            if slot in reserved:
                continue
            if report.state == registry_pb2.SLOT_STATE_FREE and number >= void_numbers.get(slot, 0):
                free.append((number, slot))
        takes_sessions = worker.takes_sessions
        return cls(
            worker=worker,
            free_slots=tuple(slot for _, slot in sorted(free)) if takes_sessions else (),
            last_number=last_number,
            is_able=bool(held or idle_count),
            idle_count=idle_count if takes_sessions else 0,
            held=frozenset(held if takes_sessions else ()),
            ability=(frozenset(worker.register.kinds), labels_of(worker.register)),
        )

    @property
    def rank(self) -> _Rank:
        """Sort key: most free slots first, then longest unused, then earliest registered."""
        return -len(self.free_slots), self.last_number, self.worker.epoch, self.worker.worker_id

    @property
    def is_open(self) -> bool:
        """True if the worker takes a session as soon as one of its slots is free."""
        return self.is_able and self.worker.takes_sessions


class _Group:
    """The workers that serve the same kinds of session and have the same labels."""

    def __init__(self, kinds: frozenset[lease_pb2.SessionKind], labels: Labels) -> None:
        self.kinds = kinds
        self.labels = labels
        self.ranks: SortedList[_Rank] = SortedList()  # of workers with free slots
        self.attached_count = 0
        self.able_count = 0
        self.open_count = 0
        self._idle_count = 0
        self._held_since: dict[lease_pb2.SessionKind, SortedList[float]] = {}

    @property
    def supply(self) -> Supply:
        """The slots of these workers, for a forecast."""
        return Supply(self._idle_count, self._held_since)

    def replace(self, former: Candidate | None, candidate: Candidate | None) -> None:
        """Replace the entry `former` of a worker by `candidate`.

        `former` is None for a new worker; `candidate` is None for a worker that leaves the group.
        """
        if former:
            self._count(former, -1)
            if former.free_slots:
                self.ranks.remove(former.rank)
        if candidate:
            self._count(candidate, 1)
            if candidate.free_slots:
                self.ranks.add(candidate.rank)
        before = former.held if former else frozenset[_Held]()
        after = candidate.held if candidate else frozenset[_Held]()
        for _, kind, since in before - after:
            self._held_since[kind].remove(since)
            if not self._held_since[kind]:
                del self._held_since[kind]
        for _, kind, since in after - before:
            self._held_since.setdefault(kind, SortedList()).add(since)

    def _count(self, candidate: Candidate, sign: int) -> None:
        self.attached_count += sign
        self.able_count += sign * candidate.is_able
        self.open_count += sign * candidate.is_open
        self._idle_count += sign * candidate.idle_count


class SlotIndex:
    """The workers of one pool, arranged so that the best free slot is found quickly."""

    def __init__(self) -> None:
        self._candidates: dict[str, Candidate] = {}  # by worker id
        self._groups: dict[_Ability, _Group] = {}
        self._by_label: dict[tuple[str, str], dict[_Ability, _Group]] = {}
        self._free: dict[_Ability, _Group] = {}  # groups with free slots

    def __len__(self) -> int:
        return len(self._candidates)

    @property
    def has_free(self) -> bool:
        """True if a slot is free."""
        return bool(self._free)

    def grantable(self, queues: Mapping[Needs, FairQueue]) -> Sequence[FairQueue]:
        """Return the queues for which a slot that meets their needs is free."""
        free = [group.labels for group in self._free.values()]
        return [
            queue
            for needs, queue in queues.items()
            if (labels := self.labels_for(needs)) is not None and any(map(labels.issubset, free))
        ]

    def has_model(self, needs: Needs) -> bool:
        """True if a worker that meets the other needs has the model that is asked for by name."""
        named = with_model(needs.labels, needs.model)
        return bool(needs.model) and any(True for _ in self._having(named))

    def labels_for(self, needs: Needs) -> Labels | None:
        """Return the labels that a worker must have for a ticket with these needs.

        A model that a worker has replaces the label `model`. Any other name of a model is ignored
        if only one model comes into question. None if there are several.
        """
        if not needs.model:
            return needs.labels
        named = with_model(needs.labels, needs.model)
        if self.has_model(needs):
            return named
        match self._models_for(needs.labels):
            case []:
                return named
            case [""]:
                return needs.labels
            case [model]:
                return with_model(needs.labels, model)
            case _:
                return None

    def ambiguous_models(self, needs: Needs) -> Sequence[str]:
        """Return the models that come into question, if `labels_for(needs)` is None."""
        return () if self.labels_for(needs) is not None else self._models_for(needs.labels)

    def _models_for(self, labels: Labels) -> Sequence[str]:
        """Return the models of the workers that have `labels`, sorted; "" for workers without one.

        Workers that only wait for the end of their sessions count only if there are no others.
        """
        groups = list(self._having(labels))
        able = [group for group in groups if group.able_count]
        return sorted({model_of(group.labels) for group in able or groups})

    def attached_kinds(self, needs: Needs) -> Collection[lease_pb2.SessionKind]:
        """Return the kinds that the workers that meet `needs` serve, including draining workers."""
        return frozenset[lease_pb2.SessionKind]().union(*(one.kinds for one in self._able(needs)))

    def able_kinds(self, needs: Needs) -> Collection[lease_pb2.SessionKind]:
        """Return the kinds for which a slot that meets `needs` can be granted, now or later."""
        able = (group.kinds for group in self._able(needs) if group.able_count)
        return frozenset[lease_pb2.SessionKind]().union(*able)

    def supplies(self) -> Sequence[Supply]:
        """Return the slots that can be granted now or later, grouped by kinds and labels."""
        return [group.supply for group in self._groups.values()]

    def supplies_for(self, needs: Needs, kind: lease_pb2.SessionKind) -> Sequence[int]:
        """Return the indices in `supplies()` of the slots that a ticket can use."""
        labels = self.labels_for(needs)
        return [
            index
            for index, group in enumerate(self._groups.values())
            if labels is not None and kind in group.kinds and labels <= group.labels
        ]

    def some_supplies(
        self, needs: Needs, kind: lease_pb2.SessionKind, limit: int
    ) -> tuple[Sequence[Supply], float]:
        """Return up to `limit` supplies that a ticket can use.

        The second value is their fraction of all supplies that the ticket can use.
        """
        groups = [group for group in self._able(needs) if kind in group.kinds]
        some = [group.supply for group in groups[:limit]]
        return some, len(some) / max(1, len(groups))

    @property
    def group_count(self) -> int:
        """The number of groups of workers that have the same kinds and labels."""
        return len(self._groups)

    def put(self, candidate: Candidate) -> None:
        """Add a worker, or replace its entry."""
        worker_id = candidate.worker.worker_id
        ability = candidate.ability
        former = self._candidates.get(worker_id)
        if former and former.ability != ability:
            self.remove(worker_id)
            former = None
        self._replace(ability, former, candidate)
        self._candidates[worker_id] = candidate

    def remove(self, worker_id: str) -> None:
        """Remove a worker, if it is there."""
        candidate = self._candidates.pop(worker_id, None)
        if candidate is None:
            return
        group = self._replace(candidate.ability, candidate, None)
        if not group.attached_count:
            del self._groups[candidate.ability]
            for label in group.labels:
                del self._by_label[label][candidate.ability]
                if not self._by_label[label]:
                    del self._by_label[label]

    def _replace(
        self, ability: _Ability, former: Candidate | None, candidate: Candidate | None
    ) -> _Group:
        """Replace a worker's entry in the group that `ability` names; return this group."""
        group = self._groups.get(ability)
        if group is None:
            group = self._groups[ability] = _Group(*ability)
            for label in group.labels:
                self._by_label.setdefault(label, {})[ability] = group
        group.replace(former, candidate)
        if group.ranks:
            self._free[ability] = group
        else:
            self._free.pop(ability, None)
        return group

    def best(
        self, request: lease_pb2.AcquireLeaseRequest, needs: Needs, *, may_avoid: bool
    ) -> Candidate | None:
        """Return the worker whose slot a request gets, or None if the request has to wait.

        A worker that the request avoids is chosen only if no other worker has a free slot. With
        `may_avoid`, the request waits even then if another worker, whose slots are all in use,
        takes sessions of its kind.
        """
        avoided = self._avoided(request)
        best = self._best(request, needs, avoided)
        if best is None and avoided and not (may_avoid and self._has_other(request, needs)):
            return self._best(request, needs, ())
        return best

    def _best(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        needs: Needs,
        left_out: Collection[str],
    ) -> Candidate | None:
        best: _Rank | None = None
        labels = self.labels_for(needs)
        if labels is None:
            return None
        for group in self._free.values():
            if request.kind in group.kinds and labels <= group.labels:
                rank = next((rank for rank in group.ranks if rank[-1] not in left_out), None)
                best = min(filter(None, (best, rank)), default=None)
        return self._candidates[best[-1]] if best else None

    def _has_other(self, request: lease_pb2.AcquireLeaseRequest, needs: Needs) -> bool:
        """True if a worker that the request does not avoid takes sessions of its kind."""
        groups = [group for group in self._able(needs) if request.kind in group.kinds]
        known = (self._candidates[worker_id] for worker_id in self._avoided(request))
        able = {(group.kinds, group.labels) for group in groups}
        avoided_open = sum(one.is_open and one.ability in able for one in known)
        return avoided_open < sum(group.open_count for group in groups)

    def _avoided(self, request: lease_pb2.AcquireLeaseRequest) -> Collection[str]:
        """Return the workers that a request avoids, without those that were restarted since."""
        incarnations = itertools.chain(request.avoided_worker_incarnations, itertools.repeat(""))
        return {
            worker_id
            for worker_id, incarnation in zip(
                request.avoided_worker_ids, incarnations, strict=False
            )
            if (known := self._candidates.get(worker_id))
            and incarnation in ("", *_names(known.worker.register.incarnation))
        }

    def _able(self, needs: Needs) -> Iterator[_Group]:
        """Return the groups that meet `needs`."""
        labels = self.labels_for(needs)
        return iter(()) if labels is None else self._having(labels)

    def _having(self, labels: Labels) -> Iterator[_Group]:
        """Yield the groups that have `labels`. Only groups with the rarest label are examined."""
        labelled = (self._by_label.get(label, {}) for label in labels)
        tried = min(labelled, key=len, default=self._groups)
        return (group for group in tried.values() if labels <= group.labels)


def _names(incarnation: str) -> tuple[str, str]:
    """Return what callers may call a process; schedulers of older releases told the second."""
    return public_incarnation(incarnation), incarnation


def next_grant(
    queue: FairQueue, slots: SlotIndex, now: float, reserved: Collection[int] = ()
) -> tuple[Ticket, Candidate] | None:
    """Return the ticket to grant next, and the worker whose first free slot it gets.

    Returns None if nothing can be granted. Tickets whose order is `reserved` are left out. If the
    first ticket avoids every worker with a free slot, a later ticket gets that slot.
    """
    for ticket in _foremost(queue, slots, reserved):
        may_avoid = queue.avoids_until(ticket) > now
        if candidate := slots.best(ticket.request, queue.needs, may_avoid=may_avoid):
            return ticket, candidate
        if not may_avoid:
            break
    return None


def avoidance_end(
    queue: FairQueue, slots: SlotIndex, after: float, reserved: Collection[int] = ()
) -> float | None:
    """Return the first time after `after` at which one of the first tickets avoids no worker."""
    ends = map(queue.avoids_until, _foremost(queue, slots, reserved))
    return min((end for end in ends if end > after), default=None)


def _foremost(queue: FairQueue, slots: SlotIndex, reserved: Collection[int]) -> Iterator[Ticket]:
    """Yield the tickets that may be granted next, first to last. Their number is bounded."""
    tickets = queue.of_kinds(slots.able_kinds(queue.needs))
    waiting = (ticket for ticket in tickets if ticket.order not in reserved)
    return itertools.islice(waiting, _MAX_PASSED_OVER)
