"""Decides how a worker's report of a slot affects the grant of that slot. Pure."""

from __future__ import annotations

from enum import Enum, auto

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.store.base import Grant


class Verdict(Enum):
    """How the report of a slot affects the grant of the slot."""

    NOTHING = auto()
    CLAIMED = auto()  # the lease was accepted
    ENDED = auto()  # the lease no longer holds the slot, or can never hold it
    UNKNOWN_LEASE = auto()  # the lease that holds the slot has no grant in the store


def judge(grant: Grant | None, report: registry_pb2.SlotReport) -> Verdict:
    """Compare the grant of a slot with the worker's report of the slot.

    If they differ, the report is right, unless it is too old: a fencing number below that of the
    grant shows that the worker sent the report before it saw the lease.
    """
    is_occupied = report.state == registry_pb2.SLOT_STATE_OCCUPIED
    if grant is None:
        return Verdict.UNKNOWN_LEASE if is_occupied else Verdict.NOTHING
    if is_occupied and report.lease_id == grant.claims.lease_id:
        return Verdict.NOTHING if grant.is_claimed else Verdict.CLAIMED
    is_broken = report.state == registry_pb2.SLOT_STATE_BROKEN
    is_seen = report.fencing_number >= grant.claims.fencing_number
    return Verdict.ENDED if grant.is_claimed or is_broken or is_seen else Verdict.NOTHING
