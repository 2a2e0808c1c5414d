"""Builds the contract's messages from the scheduler's state. Contains no decisions."""

from __future__ import annotations

from duplane.fabric.durations import to_duration
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2
from duplane.scheduler.holders import session_proof, ticket_proof
from duplane.scheduler.incarnations import public_incarnation
from duplane.scheduler.lost_workers import LostWorker
from duplane.scheduler.policy.fair_queue import QueueEntry
from duplane.scheduler.policy.hold_times import MIN_SAMPLE_COUNT, HoldTimes
from duplane.scheduler.policy.needs import MODEL
from duplane.scheduler.signing import LeaseKeys
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Grant, Ticket, Worker


def queued(entry: QueueEntry, state: SchedulerState, ticket_key: bytes) -> lease_pb2.Queued:
    """Return the message with a caller's place in the queue."""
    wait_s = state.wait_s(entry.ticket)
    return lease_pb2.Queued(
        ticket_id=entry.ticket.ticket_id,
        position=entry.position,
        queue_length=state.queue_length(entry.ticket),
        estimated_wait=None if wait_s is None else to_duration(wait_s),
        ticket_proof=_proof(entry.ticket, ticket_key),
    )


def _proof(ticket: Ticket, key: bytes, *, is_granted: bool = False) -> bytes:
    return ticket_proof(key, ticket.order, ticket.holder, is_granted=is_granted)


def _session_proof(ticket: Ticket, key: bytes) -> bytes:
    request = ticket.request
    return session_proof(key, ticket.order, request.session_id, request.tenant_id)


def granted(
    grant: Grant, worker: Worker, keys: LeaseKeys, claim_timeout_s: float, ticket_key: bytes
) -> lease_pb2.Granted:
    """Return the message that gives a caller its grant, with the signed lease."""
    register = worker.register
    return lease_pb2.Granted(
        lease=keys.sign(grant.claims),
        lease_id=grant.claims.lease_id,
        worker_address=register.address,
        claim_timeout=to_duration(claim_timeout_s),
        ticket_id=grant.ticket.ticket_id if grant.ticket else "",
        ticket_proof=_proof(grant.ticket, ticket_key, is_granted=True) if grant.ticket else b"",
        session_proof=_session_proof(grant.ticket, ticket_key) if grant.ticket else b"",
        worker_id=grant.claims.worker_id,
        worker_incarnation=public_incarnation(register.incarnation),
        model=register.model if register.HasField("model") else None,
        model_label=register.labels.get(MODEL, ""),
        release=register.release,
        features=register.features,
    )


def revoke(grant: Grant) -> registry_pb2.Revoke:
    """Return the message that tells a worker that a lease is void."""
    claims = grant.claims
    return registry_pb2.Revoke(
        slot=claims.slot,
        fencing_number=claims.fencing_number,
        lease_id=claims.lease_id,
        is_end=grant.is_ended,
    )


def worker_status(
    worker: Worker,
    report: registry_pb2.Report | None,
    report_age_s: float,
    state: SchedulerState,
) -> admin_pb2.WorkerStatus:
    """Return the description of a worker for operators."""
    status = admin_pb2.WorkerStatus(
        worker=worker.register,
        worker_epoch=worker.epoch,
        is_draining=worker.is_draining or worker.is_drain_requested,
        report=report,
        attached_duration=to_duration(state.attached_s(worker.worker_id)),
        report_age=to_duration(report_age_s),
        is_silent=worker.is_silent,
        is_unreachable=worker.is_unreachable,
    )
    _complete(status, worker)
    return status


def lost_worker_status(
    lost: LostWorker, report: registry_pb2.Report | None, report_age_s: float, now: float
) -> admin_pb2.WorkerStatus:
    """Return the description of a lost worker for operators."""
    worker = lost.worker
    status = admin_pb2.WorkerStatus(
        worker=worker.register,
        worker_epoch=worker.epoch,
        is_draining=worker.is_draining or worker.is_drain_requested,
        report=report,
        attached_duration=to_duration(lost.attached_s),
        report_age=to_duration(report_age_s),
        is_silent=True,
        is_unreachable=worker.is_unreachable,
        lost_duration=to_duration(now - lost.lost_at),
        lost_reason=lost.reason,
    )
    _complete(status, worker)
    return status


def _complete(status: admin_pb2.WorkerStatus, worker: Worker) -> None:
    """Replace what the worker registered by what it has reported last, without its secret."""
    status.worker.ClearField("incarnation")
    status.worker.ClearField("stream_number")
    del status.worker.slots[:]
    status.worker.slots.extend(worker.slots)
    status.worker.is_draining = worker.is_draining


def lease_status(grant: Grant, state: SchedulerState) -> admin_pb2.LeaseStatus:
    """Return the description of a lease for operators."""
    held_s = state.held_s(grant.claims.lease_id)
    remaining_s = state.hold_times.remaining_s(grant.claims.kind, held_s)
    worker = state.workers.get(grant.claims.worker_id)
    return admin_pb2.LeaseStatus(
        claims=grant.claims,
        worker_address=worker.register.address if worker else "",
        is_claimed=grant.is_claimed,
        held_duration=to_duration(held_s),
        estimated_remaining=to_duration(remaining_s),
    )


def ticket_status(entry: QueueEntry, state: SchedulerState) -> admin_pb2.TicketStatus:
    """Return the description of a ticket for operators."""
    request = entry.ticket.request
    wait_s = state.wait_s(entry.ticket)
    return admin_pb2.TicketStatus(
        ticket_id=entry.ticket.ticket_id,
        kind=request.kind,
        pool=request.pool,
        session_id=request.session_id,
        position=entry.position,
        estimated_wait=None if wait_s is None else to_duration(wait_s),
        waited_duration=to_duration(state.clock() - entry.since),
        needs=request.needs,
        tenant_id=request.tenant_id,
    )


def estimates(times: HoldTimes) -> admin_pb2.Estimates:
    """Return, for operators, the values from which waits are estimated."""
    message = admin_pb2.Estimates(smoothing=times.smoothing, needed_sample_count=MIN_SAMPLE_COUNT)
    for kind, base_s in times.base_s.items():
        mean_s = times.mean_s(kind)
        message.holds.add(
            kind=kind,
            base_duration=to_duration(base_s),
            mean_duration=None if mean_s is None else to_duration(mean_s),
            sample_count=times.sample_count(kind),
        )
    return message
