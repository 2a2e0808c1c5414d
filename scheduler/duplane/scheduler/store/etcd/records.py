"""Converts facts to the values of etcd's keys, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.store.base import (
    DrainRequest,
    Grant,
    GrantEnd,
    TenantTime,
    Ticket,
    Worker,
)
from duplane.scheduler.store.etcd import records_pb2 as pb

_ENDS = {
    GrantEnd.RELEASED: pb.GRANT_END_RECORD_RELEASED,
    GrantEnd.RETURNED: pb.GRANT_END_RECORD_RETURNED,
    GrantEnd.EXPIRED: pb.GRANT_END_RECORD_EXPIRED,
    GrantEnd.WORKER_GONE: pb.GRANT_END_RECORD_WORKER_GONE,
}
_ENDS_BY_RECORD = {record: end for end, record in _ENDS.items()}


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose ticket waits or was granted."""

    ticket: Ticket
    is_granted: bool
    # The etcd lease of a scheduler: before the grant, the scheduler at which the caller waits;
    # after the grant, the scheduler to which the worker is attached.
    lease: int


@dataclass(frozen=True, slots=True)
class Slot:
    """The last grant of a slot."""

    grant: Grant
    claim_timeout_s: float
    end: GrantEnd | None  # None: the grant is live

    @property
    def fencing_number(self) -> int:
        """The fencing number of the grant."""
        return self.grant.claims.fencing_number


def worker_value(worker: Worker, base: int) -> bytes:
    """Encode a registration. Epoch 0 stands for `base` plus the revision that writes the value."""
    record = pb.WorkerRecord(
        base=base,
        epoch=worker.epoch,
        register=worker.register,
        is_draining=worker.is_draining,
        is_drain_requested=worker.is_drain_requested,
        is_silent=worker.is_silent,
        is_unreachable=worker.is_unreachable,
        is_leaving=worker.is_leaving,
        is_stop_requested=worker.drain_request is DrainRequest.STOP,
        is_undrain_requested=worker.drain_request is DrainRequest.UNDRAIN,
    )
    return record.SerializeToString()


def read_worker(value: bytes, revision: int) -> Worker:
    """Decode a registration that `revision` wrote.

    It has slots only if a scheduler of an older release wrote it.
    """
    record = pb.WorkerRecord.FromString(value)
    return Worker(
        epoch=record.epoch or record.base + revision,
        register=record.register,
        slots=tuple(record.register.slots),
        is_draining=record.is_draining,
        drain_request=_drain_request(record),
        is_silent=record.is_silent,
        is_unreachable=record.is_unreachable,
        is_leaving=record.is_leaving,
    )


def _drain_request(record: pb.WorkerRecord) -> DrainRequest:
    """Return the last request. Schedulers of older releases know only `is_drain_requested`."""
    if record.is_drain_requested:
        return DrainRequest.STOP if record.is_stop_requested else DrainRequest.DRAIN
    return DrainRequest.UNDRAIN if record.is_undrain_requested else DrainRequest.NONE


def reports_value(slots: Iterable[registry_pb2.SlotReport]) -> bytes:
    """Encode the reports of all slots of a worker."""
    return registry_pb2.Report(slots=slots).SerializeToString()


def read_reports(value: bytes) -> tuple[registry_pb2.SlotReport, ...]:
    """Decode the reports of all slots of a worker."""
    return tuple(registry_pb2.Report.FromString(value).slots)


def request_value(ticket: Ticket, base: int, *, is_granted: bool) -> bytes:
    """Encode a request. Order 0 stands for `base` plus the revision that writes the value."""
    return _request_record(ticket, base, is_granted=is_granted).SerializeToString()


def read_request(value: bytes, revision: int, lease: int) -> Request:
    """Decode a request that `revision` wrote."""
    record = pb.RequestRecord.FromString(value)
    return Request(_ticket(record, revision), record.is_granted, lease)


def slot_value(slot: Slot, base: int) -> bytes:
    """Encode a grant. Fencing number 0 stands for `base` plus the revision that writes it."""
    grant = slot.grant
    record = pb.SlotRecord(
        base=base,
        claims=grant.claims,
        is_claimed=grant.is_claimed,
        is_revoked=grant.is_revoked,
        is_ended_by_operator=grant.is_ended,
        claim_timeout_s=slot.claim_timeout_s,
        end=_ENDS[slot.end] if slot.end else pb.GRANT_END_RECORD_UNSPECIFIED,
    )
    if grant.ticket:
        record.request.CopyFrom(_request_record(grant.ticket, base, is_granted=True))
    return record.SerializeToString()


def read_slot(value: bytes, revision: int) -> Slot:
    """Decode a grant that `revision` wrote."""
    record = pb.SlotRecord.FromString(value)
    claims = lease_pb2.LeaseClaims()
    claims.CopyFrom(record.claims)
    claims.fencing_number = claims.fencing_number or record.base + revision
    ticket = _ticket(record.request, revision) if record.HasField("request") else None
    grant = Grant(claims, ticket, record.is_claimed, record.is_revoked, record.is_ended_by_operator)
    return Slot(grant, record.claim_timeout_s, _ENDS_BY_RECORD.get(record.end))


def time_value(time: TenantTime) -> bytes:
    """Encode the time of a tenant."""
    return pb.TimeRecord(day=time.day, held_s=time.held_s).SerializeToString()


def read_time(tenant_id: str, value: bytes) -> TenantTime:
    """Decode the time of a tenant."""
    record = pb.TimeRecord.FromString(value)
    return TenantTime(tenant_id, record.day, record.held_s)


def _request_record(ticket: Ticket, base: int, *, is_granted: bool) -> pb.RequestRecord:
    return pb.RequestRecord(
        base=base,
        order=ticket.order,
        owner=ticket.owner,
        request=ticket.request,
        is_granted=is_granted,
        holder=ticket.holder,
    )


def _ticket(record: pb.RequestRecord, revision: int) -> Ticket:
    order = record.order or record.base + revision
    return Ticket(order, record.owner, record.request, record.holder)
