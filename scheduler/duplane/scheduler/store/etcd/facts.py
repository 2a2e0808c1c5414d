"""One scheduler's copy of the facts in etcd: registrations, tickets and grants. Pure.

Events of etcd change the copy, and the copy returns the changes to publish. All schedulers apply
the events in the order of etcd's revisions, so their copies go through the same states.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from google.protobuf.message import DecodeError

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    TenantTime,
    Ticket,
    TicketGone,
    TicketPut,
    TimePut,
    Worker,
    WorkerGone,
    WorkerPut,
)
from duplane.scheduler.store.etcd.keys import Keys, SlotKey
from duplane.scheduler.store.etcd.records import (
    Request,
    Slot,
    read_reports,
    read_request,
    read_slot,
    read_time,
    read_worker,
)

Key = TypeVar("Key")
Value = TypeVar("Value")
_log = logging.getLogger(__name__)
_VOID_ENDS = (GrantEnd.RETURNED, GrantEnd.EXPIRED)


class Facts:
    """The facts at one revision."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.revision = 0  # revision of the last event that was applied
        self.base = 0
        self.ticket_key = b""
        self.sessions: dict[str, int] = {}  # the revision that wrote each session, by its name
        self.present: set[str] = set()  # the names of the sessions whose schedulers are alive
        self.signing_keys: dict[bytes, registry_pb2.VerificationKey] = {}  # by key of etcd
        self.verification_keys: Sequence[registry_pb2.VerificationKey] = ()  # one for each key id
        self.workers: dict[str, Worker] = {}  # with the latest reports of their slots
        self.slots: dict[SlotKey, Slot] = {}
        self.granted: dict[str, Grant] = {}  # live grants, by request id
        self.requests: dict[str, Request] = {}
        self.tickets: dict[int, Ticket] = {}  # waiting tickets, by order
        self.times: dict[str, TenantTime] = {}  # by tenant
        self._highest = 0  # the highest number so far
        self._held: dict[bytes, tuple[int, int]] = {}  # revision and lease of every key
        self._slots_by_worker: dict[str, set[int]] = {}
        # By worker id: the registrations as they are stored, the reports of all slots, and later
        # reports by slot.
        self._registrations: dict[str, Worker] = {}
        self._reports: dict[str, Sequence[registry_pb2.SlotReport]] = {}
        self._later_reports: dict[str, dict[int, registry_pb2.SlotReport]] = {}
        self._waiting_counts: Counter[str] = Counter()  # by pool

    @property
    def number(self) -> int:
        """The base plus the present revision."""
        return self.base + self.revision

    @property
    def least_base(self) -> int:
        """The lowest base with which new numbers are higher than all earlier numbers.

        This is the present base, or a higher base if etcd went back to an older revision.
        """
        return max(self.base, self._highest - self.revision)

    def written_at(self, key: bytes) -> int:
        """Return the revision that wrote a key, or 0 if the key is absent."""
        return self._held.get(key, (0, 0))[0]

    def lease_of(self, key: bytes) -> int:
        """Return the etcd lease that a key is attached to, or 0 if there is none."""
        return self._held.get(key, (0, 0))[1]

    def live_slots(self, worker_id: str) -> Sequence[Slot]:
        """Return the live grants of a worker."""
        slots = (self.slots[worker_id, slot] for slot in self._slots_by_worker.get(worker_id, ()))
        return [slot for slot in slots if slot.end is None]

    def waiting_count(self, pool: str) -> int:
        """Return how many tickets wait in a pool."""
        return self._waiting_counts[pool]

    def grant_of(self, key: SlotKey) -> Grant | None:
        """Return the live grant of a slot."""
        slot = self.slots.get(key)
        return slot.grant if slot and slot.end is None else None

    def snapshot(self) -> Sequence[Change]:
        """Return the changes that turn an empty store into these facts."""
        empty = Facts(self.keys)
        empty.base, empty.revision = self.base, self.revision
        transition = _Transition(empty)
        transition.slots = dict.fromkeys(self.slots)
        transition.workers = dict.fromkeys(self.workers)
        transition.tickets = dict.fromkeys(self.tickets)
        transition.times = dict.fromkeys(self.times)
        return [change for change in transition.changes_to(self) if change]

    def replace(
        self,
        held: Sequence[etcd_pb2.KeyValue],
        revision: int,
        *,
        is_other_history: bool = False,
    ) -> Iterator[Change | None]:
        """Replace the facts by the content of etcd after missed events; yield as `apply` does.

        `is_other_history` means that equal revisions may have written different values.
        """
        events = self._missed_events(held, is_other_history)
        return self.apply(events, revision, were_missed=True)

    def apply(
        self,
        events: Iterable[etcd_pb2.Event | None],
        revision: int,
        *,
        were_missed: bool = False,
    ) -> Iterator[Change | None]:
        """Apply all events of one revision, then yield the changes in the order of publication.

        Also yields None, after each event and between two steps of long computations, so that the
        caller can pause. From the first change on, the facts are those of `revision`.
        `were_missed` means that the events sum up several revisions.
        """
        transition = _Transition(self, were_missed=were_missed)
        for event in events:
            if event:
                self._apply_event(event, transition)
            yield None
        for worker_id in transition.workers:
            self._update_worker(worker_id)
            yield None
        self.revision = revision
        self._highest = max(self._highest, self.number)
        yield from transition.changes_to(self)

    def _missed_events(
        self, held: Sequence[etcd_pb2.KeyValue], is_other_history: bool
    ) -> Iterator[etcd_pb2.Event | None]:
        """Yield an event for each key that differs from the facts, and None for each other key."""
        present: set[bytes] = set()
        for one in held:
            present.add(one.key)
            is_new = is_other_history or one.mod_revision != self.written_at(one.key)
            yield etcd_pb2.Event(kv=one) if is_new else None
        for key in [known for known in self._held if known not in present]:
            gone = etcd_pb2.KeyValue(key=key)
            yield etcd_pb2.Event(type=etcd_pb2.Event.DELETE, kv=gone)

    def _apply_event(self, event: etcd_pb2.Event, transition: _Transition) -> None:
        key = event.kv.key
        is_put = event.type == etcd_pb2.Event.PUT
        if is_put:
            self._held[key] = event.kv.mod_revision, event.kv.lease
        else:
            self._held.pop(key, None)
        try:
            self._apply_one(event.kv, is_put, transition)
        except (ValueError, IndexError, DecodeError) as error:  # no scheduler wrote this key
            _log.error("%r in etcd cannot be read and is ignored: %s", key, error)

    def _apply_one(self, held: etcd_pb2.KeyValue, is_put: bool, transition: _Transition) -> None:
        kind, *parts = self.keys.parse(held.key)
        match kind:
            case "base" | "ticket-key":
                self._apply_shared(kind, held.value if is_put else b"")
            case "session":
                _put(self.sessions, parts[0], held.mod_revision if is_put else None)
            case "presence":
                (self.present.add if is_put else self.present.discard)(parts[0])
            case "signing":
                read = registry_pb2.VerificationKey.FromString
                _put(self.signing_keys, held.key, read(held.value) if is_put else None)
                by_id = {key.key_id: key for key in self.signing_keys.values()}
                self.verification_keys = tuple(by_id.values())
            case "worker" | "reports" | "report":
                transition.workers.setdefault(parts[0], self.workers.get(parts[0]))
                self._apply_worker(kind, parts, held, is_put)
            case "slot":
                slot = read_slot(held.value, held.mod_revision) if is_put else None
                self._apply_slot((parts[0], int(parts[1])), slot, transition)
            case "request":
                request = (
                    read_request(held.value, held.mod_revision, held.lease) if is_put else None
                )
                self._apply_request(parts[0], request, transition)
            case "time":
                time = read_time(parts[0], held.value) if is_put else None
                transition.times[parts[0]] = None
                _put(self.times, parts[0], time)
            case _:
                pass

    def _apply_worker(
        self, kind: str, parts: Sequence[str], held: etcd_pb2.KeyValue, is_put: bool
    ) -> None:
        """Apply a registration, the reports of all slots of a worker, or the report of one slot."""
        match kind:
            case "worker":
                worker = read_worker(held.value, held.mod_revision) if is_put else None
                _put(self._registrations, parts[0], worker)
            case "reports":
                _put(self._reports, parts[0], read_reports(held.value) if is_put else None)
            case _:
                report = registry_pb2.SlotReport.FromString(held.value) if is_put else None
                self._apply_report(parts[0], int(parts[1]), report)

    def _apply_shared(self, kind: str, value: bytes) -> None:
        if kind == "base":
            self.base = int(value or b"0")
        else:
            self.ticket_key = value

    def _apply_report(
        self, worker_id: str, slot: int, report: registry_pb2.SlotReport | None
    ) -> None:
        later = self._later_reports.setdefault(worker_id, {})
        _put(later, slot, report)
        if not later:
            del self._later_reports[worker_id]

    def _update_worker(self, worker_id: str) -> None:
        """Put a worker's registration together with the latest reports of its slots."""
        worker = self._registrations.get(worker_id)
        # If the registration has slots, a scheduler of an older release wrote it. Then the reports
        # are left from an earlier registration.
        if worker and not worker.slots:
            later = self._later_reports.get(worker_id, {})
            reports = enumerate(self._reports.get(worker_id, ()))
            slots = tuple(later.get(number, report) for number, report in reports)
            worker = replace(worker, slots=slots)
        _put(self.workers, worker_id, worker)

    def _apply_slot(self, key: SlotKey, slot: Slot | None, transition: _Transition) -> None:
        worker_id, number = key
        former = self.slots.get(key)
        transition.slots.setdefault(key, former)
        _put(self.slots, key, slot)
        if former and former.end is None and former.grant.ticket:
            request_id = former.grant.ticket.request.request_id
            granted = self.granted.get(request_id)
            # After missed events, the request may already have its next grant, in another slot.
            if granted and granted.claims.lease_id == former.grant.claims.lease_id:
                del self.granted[request_id]
        if slot and slot.end is None and slot.grant.ticket:
            self.granted[slot.grant.ticket.request.request_id] = slot.grant
        numbers = self._slots_by_worker.setdefault(worker_id, set())
        if slot:
            numbers.add(number)
        else:
            numbers.discard(number)
        if not numbers:
            del self._slots_by_worker[worker_id]

    def _apply_request(
        self, request_id: str, request: Request | None, transition: _Transition
    ) -> None:
        former = self.requests.get(request_id)
        if former and not former.is_granted:
            order = former.ticket.order
            transition.note_ticket(order, former)
            waiting = self.tickets.get(order)
            if waiting and waiting.request.request_id == request_id:
                self._remove_ticket(order)
        _put(self.requests, request_id, request)
        if request and not request.is_granted:
            transition.note_ticket(request.ticket.order, None)
            self._remove_ticket(request.ticket.order)
            self.tickets[request.ticket.order] = request.ticket
            self._waiting_counts[request.ticket.request.pool] += 1

    def _remove_ticket(self, order: int) -> None:
        if ticket := self.tickets.pop(order, None):
            self._waiting_counts[ticket.request.pool] -= 1
            if not self._waiting_counts[ticket.request.pool]:
                del self._waiting_counts[ticket.request.pool]


class _Transition:
    """The facts that one revision changes, with their values before that revision."""

    def __init__(self, before: Facts, *, were_missed: bool = False) -> None:
        self.slots: dict[SlotKey, Slot | None] = {}
        self.workers: dict[str, Worker | None] = {}
        self.tickets: dict[int, Request | None] = {}
        self.times: dict[str, None] = {}  # tenants whose time was saved; a dict keeps their order
        self._before = before
        self._were_missed = were_missed

    def note_ticket(self, order: int, request: Request | None) -> None:
        """Record which request had the order number `order` before the revision.

        Only the first call for a number has an effect. If `request` is None, the request is looked
        up in the facts before the revision.
        """
        known = self._before.tickets.get(order)
        if request is None and known:
            request = self._before.requests.get(known.request.request_id)
        self.tickets.setdefault(order, request)

    def changes_to(self, after: Facts) -> Iterator[Change | None]:
        """Yield the changes: ends of grants, then workers, grants, tickets and times of tenants.

        Also yields None between two steps of long computations. Call this only once: it discards
        the recorded values step by step, because discarding them all together would take long.
        """
        number = after.number
        yield from self._ended_grants(after, number)
        yield from self._workers(after, number)
        yield from self._grants(after, number)
        yield from self._tickets(after, number)
        for tenant_id in self.times:
            time = after.times.get(tenant_id)
            yield TimePut(number, time) if time else None

    def _ended_grants(self, after: Facts, number: int) -> Iterable[Change]:
        for key, former in self.slots.items():
            if former is None or former.end:
                continue
            slot = after.slots.get(key)
            if slot is None:
                yield GrantGone(number, former.grant, GrantEnd.WORKER_GONE)
            elif slot.fencing_number != former.fencing_number:
                yield GrantGone(number, former.grant, GrantEnd.RELEASED)  # the end was missed
            elif _was_adopted(former, slot):  # after an end that was missed
                yield GrantGone(number, former.grant, GrantEnd.WORKER_GONE)
            elif slot.end:
                yield GrantGone(number, former.grant, slot.end)

    def _workers(self, after: Facts, number: int) -> Iterable[Change | None]:
        for worker_id, former in self.workers.items():
            worker = after.workers.get(worker_id)
            if former and (worker is None or worker.epoch != former.epoch):
                yield WorkerGone(number, former)
        for worker_id in list(self.workers):
            del self.workers[worker_id]
            worker = after.workers.get(worker_id)
            yield WorkerPut(number, worker) if worker else None

    def _grants(self, after: Facts, number: int) -> Iterable[Change | None]:
        put: dict[int, list[tuple[Slot | None, Slot]]] = {}  # by fencing number
        for key in list(self.slots):
            former = self.slots.pop(key)
            slot = after.slots.get(key)
            if slot:
                put.setdefault(slot.fencing_number, []).append((former, slot))
            yield None
        for former, slot in (one for fencing_number in sorted(put) for one in put[fencing_number]):
            is_new = former is None or former.fencing_number != slot.fencing_number
            if slot.end is None:
                yield GrantPut(number, slot.grant)
            elif is_new and slot.end in _VOID_ENDS:
                # The events of the grant and of its end were missed. The grant is published
                # without its ticket, because the ticket may be waiting again.
                grant = Grant(slot.grant.claims)
                yield GrantPut(number, grant)
                yield GrantGone(number, grant, slot.end)

    def _tickets(self, after: Facts, number: int) -> Iterable[Change | None]:
        for order, former in self.tickets.items():
            if former and order not in after.tickets:
                request = after.requests.get(former.ticket.request.request_id)
                is_granted = request is not None and request.ticket.order == order
                # If events were missed, it is unknown whether the ticket was cancelled: it may also
                # have got a grant that has ended since.
                may_wait = self._were_missed or f"{former.lease:x}" not in after.sessions
                is_expired = not is_granted and may_wait
                yield TicketGone(number, former.ticket, is_granted, is_expired)
        for order in sorted(self.tickets):
            del self.tickets[order]
            ticket = after.tickets.get(order)
            yield TicketPut(number, ticket) if ticket else None


def _was_adopted(former: Slot, slot: Slot) -> bool:
    """True if `slot`, which has the same lease as `former`, was written from a worker's report."""
    one, other = former.grant, slot.grant
    is_later = one.claims.worker_epoch != other.claims.worker_epoch
    return is_later or (one.ticket is not None and other.ticket is None)


def _put(facts: dict[Key, Value], key: Key, value: Value | None) -> None:
    if value is None:
        facts.pop(key, None)
    else:
        facts[key] = value
