"""Facts as messages of the contract. Decides nothing."""

from __future__ import annotations

from datetime import timedelta

from google.protobuf import duration_pb2

from duplane.fabric.lease import LeaseSigner
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2
from duplane.scheduler.estimate import SAMPLES_NEEDED, HoldTimes
from duplane.scheduler.policy import Place
from duplane.scheduler.store.base import Grant, Worker
from duplane.scheduler.view import View


def duration(seconds: float) -> duration_pb2.Duration:
    """Return seconds as the contract writes them."""
    message = duration_pb2.Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def queued(place: Place, view: View) -> lease_pb2.Queued:
    """What a waiting caller is told."""
    wait_s = view.wait_s(place.ticket)
    return lease_pb2.Queued(
        ticket_id=place.ticket.ticket_id,
        position=place.position,
        queue_length=view.queue_length(place.ticket.wish.pool),
        estimated_wait=None if wait_s is None else duration(wait_s),
    )


def claims(grant: Grant) -> lease_pb2.LeaseClaims:
    """What the lease of a grant says: always the same bytes for the same grant."""
    message = lease_pb2.LeaseClaims(
        lease_id=grant.lease_id,
        worker_id=grant.worker_id,
        worker_epoch=grant.worker_epoch,
        slot=grant.slot,
        fencing_number=grant.token,
        kind=grant.kind,
        session_id=grant.session_id,
    )
    if grant.expire_time:
        message.expire_time.FromDatetime(grant.expire_time)
    return message


def granted(
    grant: Grant, worker: Worker, signer: LeaseSigner, claim_timeout_s: float
) -> lease_pb2.Granted:
    """What a caller is told that has got a slot."""
    return lease_pb2.Granted(
        lease=signer.sign(claims(grant)),
        lease_id=grant.lease_id,
        worker_address=worker.register.address,
        claim_timeout=duration(claim_timeout_s),
        ticket_id=grant.ticket.ticket_id if grant.ticket else "",
    )


def revoke(grant: Grant) -> registry_pb2.Revoke:
    """What a worker is told of a lease that is void."""
    return registry_pb2.Revoke(slot=grant.slot, fencing_number=grant.token, lease_id=grant.lease_id)


def worker_status(
    worker: Worker, report: registry_pb2.Report | None, view: View
) -> admin_pb2.WorkerStatus:
    """What operators are told of a worker."""
    return admin_pb2.WorkerStatus(
        worker=worker.register,
        worker_epoch=worker.epoch,
        is_draining=worker.is_draining or worker.is_drain_wanted,
        report=report,
        attached_duration=duration(view.attached_s(worker.worker_id)),
    )


def lease_status(grant: Grant, view: View) -> admin_pb2.LeaseStatus:
    """What operators are told of a lease."""
    held_s = view.held_s(grant.lease_id)
    return admin_pb2.LeaseStatus(
        claims=claims(grant),
        is_claimed=grant.is_claimed,
        held_duration=duration(held_s),
        estimated_remaining=duration(view.hold_times.remaining_s(grant.kind, held_s)),
    )


def ticket_status(place: Place, view: View) -> admin_pb2.TicketStatus:
    """What operators are told of a ticket."""
    wish, wait_s = place.ticket.wish, view.wait_s(place.ticket)
    return admin_pb2.TicketStatus(
        ticket_id=place.ticket.ticket_id,
        kind=wish.kind,
        pool=wish.pool,
        session_id=wish.session_id,
        position=place.position,
        estimated_wait=None if wait_s is None else duration(wait_s),
        waited_duration=duration(view.clock() - place.since),
    )


def estimates(times: HoldTimes) -> admin_pb2.Estimates:
    """What operators are told of how waits are estimated."""
    told = admin_pb2.Estimates(smoothing=times.smoothing, needed_sample_count=SAMPLES_NEEDED)
    for kind, base_s in times.base_s.items():
        mean_s = times.mean_s(kind)
        told.holds.add(
            kind=kind,
            base_duration=duration(base_s),
            mean_duration=None if mean_s is None else duration(mean_s),
            sample_count=times.sample_count(kind),
        )
    return told
