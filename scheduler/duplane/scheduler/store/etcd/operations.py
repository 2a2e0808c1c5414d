"""Each operation of the store as a transaction on the facts. Pure.

An operation reads the facts and returns its answer, or the transaction to commit. If the
transaction fails, because a fact has changed meanwhile, the operation is applied to the new facts.
The same happens if the outcome is unknown, so an operation must recognise its own earlier changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.store.base import (
    DrainRequest,
    Grant,
    GrantEnd,
    Offer,
    TenantTime,
    Ticket,
    Worker,
    replaces,
)
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.keys import SlotKey
from duplane.scheduler.store.etcd.records import (
    Slot,
    read_request,
    read_slot,
    read_worker,
    reports_value,
    request_value,
    slot_value,
    time_value,
    worker_value,
)
from duplane.scheduler.store.etcd.transactions import Answer, Done, Step, Transaction

# Maximum number of grants that one transaction ends. etcd refuses transactions of more than 128
# operations.
MAX_ENDED_COUNT = 50
# If more slots of a worker have changed, all its reports are written as one value.
MAX_LATER_REPORTS = 16


def register(facts: Facts, message: registry_pb2.Register, lease: int) -> Step[Worker | None]:
    """Add a registration, or replace one and end its grants."""
    keys = facts.keys
    worker_id = message.worker_id
    known = facts.workers.get(worker_id)
    if known and not replaces(message, known.register):
        return Done(None)
    base = _base_above(facts, message.slots)
    worker = Worker.of(0, message)
    value = worker_value(worker, base)
    step = Transaction[Worker | None](
        facts, lambda revision: replace(read_worker(value, revision), slots=worker.slots)
    )
    step.require_unchanged(keys.worker(worker_id), keys.epoch(worker_id))
    _put_base(step, base)
    _remove_grants(step, worker_id)
    step.put(keys.worker(worker_id), value, lease)
    step.put(keys.epoch(worker_id), b"", lease)
    _put_all_reports(step, worker, lease)
    return step


def unregister(facts: Facts, worker_id: str, epoch: int) -> Step[bool]:
    """Remove a registration and its grants."""
    keys = facts.keys
    if _worker(facts, worker_id, epoch) is None:
        return Done(False)
    step = Transaction[bool](facts, lambda _: True)
    step.require_unchanged(keys.worker(worker_id), keys.epoch(worker_id))
    _remove_grants(step, worker_id)
    step.delete(keys.worker(worker_id))
    step.delete(keys.epoch(worker_id))
    step.delete(keys.reports(worker_id))
    step.delete_all(keys.later_reports(worker_id))
    return step


def end_some_grants(facts: Facts, worker_id: str, may_end: Callable[[Worker], bool]) -> Step[bool]:
    """End some grants of a worker whose registration is about to end.

    If one transaction can end all remaining grants, this ends none and the answer is False.
    `may_end` returns True if the present registration is the one that is about to end.
    """
    known = facts.workers.get(worker_id)
    live = facts.live_slots(worker_id)
    if known is None or not may_end(known) or len(live) <= MAX_ENDED_COUNT:
        return Done(False)
    step = Transaction[bool](facts, lambda _: True, is_alone=True)
    step.require_unchanged(facts.keys.epoch(worker_id))
    for slot in live[:MAX_ENDED_COUNT]:
        step.require_unchanged(facts.keys.slot(_slot_key(slot.grant)))
        _end(step, slot, GrantEnd.WORKER_GONE)
    return step


def report(facts: Facts, reported: Worker) -> Step[bool]:
    """Replace the slots and flags that a worker reports. Only what has changed is written."""
    known = _worker(facts, reported.worker_id, reported.epoch)
    if known is None:
        return Done(False)
    base = _base_above(facts, reported.slots)
    changed = known.with_flags_of(reported)
    if changed != known:
        step = _put_worker(facts, changed, base)
    else:
        step = Transaction[bool](facts, lambda _: True)
        step.require_unchanged(facts.keys.epoch(known.worker_id))
        _put_base(step, base)
    _put_reports(step, known, reported)
    return step if step.changes else Done(True)


def drain(facts: Facts, worker_id: str, request: DrainRequest) -> Step[bool]:
    """Set `drain_request`."""
    known = facts.workers.get(worker_id)
    if known is None or known.drain_request in (request, DrainRequest.STOP):
        return Done(known is not None)
    return _put_worker(facts, replace(known, drain_request=request), facts.base)


def set_unreachable(facts: Facts, worker_id: str, epoch: int, is_unreachable: bool) -> Step[bool]:
    """Set `is_unreachable`."""
    known = _worker(facts, worker_id, epoch)
    if known is None or known.is_unreachable == is_unreachable:
        return Done(known is not None)
    return _put_worker(facts, replace(known, is_unreachable=is_unreachable), facts.base)


def enqueue(
    facts: Facts,
    request: lease_pb2.AcquireLeaseRequest,
    owner: str,
    order: int | None,
    lease: int,
    offer: Offer | None = None,
    holder: bytes = b"",
) -> Step[Ticket | Grant]:
    """Grant the offered slot if nobody waits, else put the request into the queue.

    If the request has a ticket in the queue already, `owner` becomes the ticket's owner. A request
    that has a grant gets the same grant again.
    """
    if grant := facts.granted.get(request.request_id):
        return Done(grant)
    known = facts.requests.get(request.request_id)
    is_waiting = known is not None and not known.is_granted
    waiting = known.ticket if known and is_waiting else facts.tickets.get(order or 0)
    if waiting and waiting.owner == owner:
        return Done(waiting)
    if waiting is None and order is None and offer and _can_accept(facts, request, offer):
        return _accept(facts, Ticket(0, owner, request, holder), offer)
    taken = waiting.order if waiting else 0
    if waiting is None and order and order < facts.number:
        taken = order
    return _put_ticket(facts, Ticket(taken, owner, request, holder), waiting, lease)


def cancel(facts: Facts, order: int, owner: str | None) -> Step[bool]:
    """Remove a ticket."""
    ticket = facts.tickets.get(order)
    if ticket is None or owner not in (None, ticket.owner):
        return Done(False)
    step = Transaction[bool](facts, lambda _: True)
    key = facts.keys.request(ticket.request.request_id)
    step.require_unchanged(key)
    step.delete(key)
    _free_order(step, order)
    return step


def try_grant(facts: Facts, ticket: Ticket, offer: Offer) -> Step[Grant | None]:
    """Replace a ticket by a grant."""
    claims = offer.claims
    present = facts.grant_of((claims.worker_id, claims.slot))
    if present and present.claims.lease_id == claims.lease_id:
        return Done(present)
    waiting = facts.tickets.get(ticket.order)
    if waiting is None or waiting.owner != ticket.owner or present:
        return Done(None)
    if not _is_attached(facts, claims):
        return Done(None)
    value = _grant_value(facts, waiting, offer)
    step = Transaction[Grant | None](facts, lambda revision: read_slot(value, revision).grant)
    _put_grant(step, waiting, offer, value)
    _free_order(step, waiting.order)
    return step


def _can_accept(facts: Facts, request: lease_pb2.AcquireLeaseRequest, offer: Offer) -> bool:
    claims = offer.claims
    is_first = not facts.waiting_count(request.pool)
    is_free = facts.grant_of((claims.worker_id, claims.slot)) is None
    return is_first and is_free and _is_attached(facts, claims)


def _accept(facts: Facts, ticket: Ticket, offer: Offer) -> Step[Ticket | Grant]:
    """Grant an offer to a request without a ticket, unless a ticket of the pool comes first."""
    value = _grant_value(facts, ticket, offer)
    step = Transaction[Ticket | Grant](facts, lambda revision: read_slot(value, revision).grant)
    step.require_unchanged(facts.keys.arrivals(ticket.request.pool))
    _put_grant(step, ticket, offer, value)
    return step


def _grant_value(facts: Facts, ticket: Ticket, offer: Offer) -> bytes:
    slot = Slot(Grant(offer.claims, ticket), offer.claim_timeout_s, None)
    return slot_value(slot, facts.base)


def _put_grant(step: Transaction[Answer], ticket: Ticket, offer: Offer, value: bytes) -> None:
    facts = step.facts
    claims = offer.claims
    request_key = facts.keys.request(ticket.request.request_id)
    epoch_key = facts.keys.epoch(claims.worker_id)
    slot_key = facts.keys.slot((claims.worker_id, claims.slot))
    step.require_unchanged(request_key, epoch_key, slot_key)
    lease = facts.lease_of(epoch_key)
    step.put(slot_key, value, lease)
    step.put(request_key, request_value(ticket, facts.base, is_granted=True), lease)


def claim(facts: Facts, grant: Grant) -> Step[bool]:
    """Mark a grant as claimed."""
    slot = _live(facts, grant)
    if slot is None or slot.grant.is_claimed:
        return Done(slot is not None)
    return _put_slot(facts, replace(slot, grant=replace(slot.grant, is_claimed=True)))


def give_back(facts: Facts, grant: Grant, *, is_end: bool = False) -> Step[bool]:
    """End an unclaimed grant; mark a claimed grant as revoked."""
    slot = _live(facts, grant)
    if slot is None:
        return Done(False)
    if not slot.grant.is_claimed:
        return _put_slot(facts, replace(slot, end=GrantEnd.RETURNED))
    if slot.grant.is_revoked and slot.grant.is_ended >= is_end:
        return Done(True)
    is_ended = is_end or slot.grant.is_ended
    revoked = replace(slot.grant, is_revoked=True, is_ended=is_ended)
    return _put_slot(facts, replace(slot, grant=revoked))


def release(facts: Facts, grant: Grant) -> Step[bool]:
    """End a grant whose lease no longer holds the slot."""
    slot = _live(facts, grant)
    return _put_slot(facts, replace(slot, end=GrantEnd.RELEASED)) if slot else Done(False)


def expire(facts: Facts, grant: Grant) -> Step[bool]:
    """End a grant that was not claimed in time."""
    slot = _live(facts, grant)
    if slot is None or slot.grant.is_claimed:
        return Done(False)
    return _put_slot(facts, replace(slot, end=GrantEnd.EXPIRED))


def adopt(facts: Facts, grant: Grant) -> Step[bool]:
    """Add the grant of a lease that a worker reports."""
    claims = grant.claims
    if not _is_attached(facts, claims):
        return Done(False)
    if present := facts.grant_of(_slot_key(grant)):
        return Done(present == grant)
    return _put_slot(facts, Slot(grant, 0.0, None))


def save_time(facts: Facts, time: TenantTime) -> Step[bool]:
    """Write the time of a tenant, unless another scheduler has written a higher one."""
    known = facts.times.get(time.tenant_id)
    if known and (known.day, known.held_s) >= (time.day, time.held_s):
        return Done(known == time)
    key = facts.keys.time(time.tenant_id)
    step = Transaction[bool](facts, lambda _: True)
    step.require_unchanged(key)
    step.put(key, time_value(time))
    return step


def _put_worker(facts: Facts, worker: Worker, base: int) -> Transaction[bool]:
    keys = facts.keys
    key, epoch_key = keys.worker(worker.worker_id), keys.epoch(worker.worker_id)
    step = Transaction[bool](facts, lambda _: True)
    step.require_unchanged(key, epoch_key)
    _put_base(step, base)
    step.put(key, worker_value(worker, base), facts.lease_of(epoch_key))
    return step


def _put_reports(step: Transaction[bool], known: Worker, reported: Worker) -> None:
    """Write the reports that differ from the known ones. If etcd has lost some, write all."""
    keys = step.facts.keys
    worker_id = known.worker_id
    lease = step.facts.lease_of(keys.epoch(worker_id))
    slots = zip(known.slots, reported.slots, strict=False)
    changed = [after for before, after in slots if before != after]
    is_whole = len(known.slots) == len(reported.slots)
    if not is_whole or len(changed) > MAX_LATER_REPORTS:
        step.require_unchanged(keys.reports(worker_id))
        _put_all_reports(step, reported, lease)
        return
    for one in changed:
        key = keys.report(worker_id, one.slot)
        step.require_unchanged(key)
        step.put(key, one.SerializeToString(), lease)


def _put_all_reports(step: Transaction[Answer], worker: Worker, lease: int) -> None:
    keys = step.facts.keys
    step.put(keys.reports(worker.worker_id), reports_value(worker.slots), lease)
    step.delete_all(keys.later_reports(worker.worker_id))


def _put_slot(facts: Facts, slot: Slot) -> Transaction[bool]:
    """Write a slot with its grant. If `slot.end` is set, mark the grant as ended."""
    keys = facts.keys
    claims = slot.grant.claims
    key, epoch_key = keys.slot(_slot_key(slot.grant)), keys.epoch(claims.worker_id)
    step = Transaction[bool](facts, lambda _: True)
    step.require_unchanged(key, epoch_key)
    if slot.end:
        _end(step, slot, slot.end)
    else:
        step.put(key, slot_value(slot, facts.base), facts.lease_of(epoch_key))
    return step


def _end(step: Transaction[bool], slot: Slot, end: GrantEnd) -> None:
    """Mark a grant as ended, and delete its request. The slot's next grant overwrites the mark."""
    facts = step.facts
    claims = slot.grant.claims
    value = slot_value(replace(slot, end=end), facts.base)
    lease = facts.lease_of(facts.keys.epoch(claims.worker_id))
    step.put(facts.keys.slot(_slot_key(slot.grant)), value, lease)
    if slot.grant.ticket:
        step.delete(facts.keys.request(slot.grant.ticket.request.request_id))


def _put_ticket(
    facts: Facts, ticket: Ticket, former: Ticket | None, lease: int
) -> Transaction[Ticket | Grant]:
    """Write a ticket. It replaces `former`, if there is one."""
    keys = facts.keys
    value = request_value(ticket, facts.base, is_granted=False)
    step = Transaction[Ticket | Grant](
        facts, lambda revision: read_request(value, revision, lease).ticket
    )
    key = keys.request(ticket.request.request_id)
    step.require_unchanged(key)
    if former and former.request.request_id != ticket.request.request_id:
        former_key = keys.request(former.request.request_id)
        step.require_unchanged(former_key)
        step.delete(former_key)
    if ticket.order and (former is None or facts.written_at(keys.order(ticket.order))):
        step.require_unchanged(keys.order(ticket.order))
        step.put(keys.order(ticket.order), b"", lease)
    step.put(key, value, lease)
    step.put(keys.arrivals(ticket.request.pool), b"", lease)
    return step


def _free_order(step: Transaction[Answer], order: int) -> None:
    key = step.facts.keys.order(order)
    if step.facts.written_at(key):
        step.delete(key)


def _remove_grants(step: Transaction[Answer], worker_id: str) -> None:
    """Delete the slots of a worker, and the requests that hold these slots."""
    keys = step.facts.keys
    step.require_none_newer(keys.slots(worker_id))
    for slot in step.facts.live_slots(worker_id):
        if slot.grant.ticket:
            step.delete(keys.request(slot.grant.ticket.request.request_id))
    step.delete_all(keys.slots(worker_id))


def _base_above(facts: Facts, slots: Iterable[registry_pb2.SlotReport]) -> int:
    """Return a base that makes later numbers greater than all numbers that a worker has seen.

    The result is above the present base if the worker comes from another store, or if etcd was
    restored from a backup.
    """
    highest = max((slot.fencing_number for slot in slots), default=0)
    return max(facts.base, highest - facts.revision)


def _put_base(step: Transaction[Answer], base: int) -> None:
    if base != step.facts.base:
        step.put(step.facts.keys.base, b"%d" % base)
        step.is_alone = True  # values of other steps contain the former base


def _worker(facts: Facts, worker_id: str, epoch: int) -> Worker | None:
    worker = facts.workers.get(worker_id)
    return worker if worker and worker.epoch == epoch else None


def _is_attached(facts: Facts, claims: lease_pb2.LeaseClaims) -> bool:
    return _worker(facts, claims.worker_id, claims.worker_epoch) is not None


def _live(facts: Facts, grant: Grant) -> Slot | None:
    slot = facts.slots.get(_slot_key(grant))
    is_same = slot and slot.fencing_number == grant.claims.fencing_number
    return slot if slot and is_same and slot.end is None else None


def _slot_key(grant: Grant) -> SlotKey:
    return grant.claims.worker_id, grant.claims.slot
