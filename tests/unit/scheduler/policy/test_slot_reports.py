"""A worker's report of a slot leads to the right verdict on the slot's grant."""

from __future__ import annotations

import pytest
from support.scheduler.scheduler_harness import BROKEN, CLEANING, FREE, OCCUPIED

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.policy.slot_reports import Verdict, judge
from duplane.scheduler.store.base import Grant

GRANT = lease_pb2.LeaseClaims(lease_id="lease-10", fencing_number=10)
UNSEEN, SEEN, OVERTAKEN = 9, 10, 11  # reported fencing numbers, for a grant of number 10


@pytest.mark.parametrize(
    ("is_claimed", "state", "lease_id", "number", "verdict"),
    [
        (False, FREE, "", UNSEEN, Verdict.NOTHING),
        (False, OCCUPIED, "lease-9", UNSEEN, Verdict.NOTHING),
        (False, CLEANING, "lease-9", UNSEEN, Verdict.NOTHING),
        (False, BROKEN, "", UNSEEN, Verdict.ENDED),
        (False, OCCUPIED, "lease-10", SEEN, Verdict.CLAIMED),
        (False, CLEANING, "lease-10", SEEN, Verdict.ENDED),  # claimed, then ended
        (False, FREE, "", SEEN, Verdict.ENDED),
        (False, OCCUPIED, "lease-11", OVERTAKEN, Verdict.ENDED),
        (True, OCCUPIED, "lease-10", SEEN, Verdict.NOTHING),
        # The scheduler has revoked a later number.
        (True, OCCUPIED, "lease-10", OVERTAKEN, Verdict.NOTHING),
        (True, CLEANING, "lease-10", SEEN, Verdict.ENDED),
        (True, FREE, "", SEEN, Verdict.ENDED),
        (True, BROKEN, "", SEEN, Verdict.ENDED),
        (True, OCCUPIED, "lease-11", OVERTAKEN, Verdict.ENDED),
    ],
)
def test_report_is_judged_against_the_grant(
    is_claimed: bool, state: registry_pb2.SlotState, lease_id: str, number: int, verdict: Verdict
) -> None:
    report = registry_pb2.SlotReport(state=state, fencing_number=number, lease_id=lease_id)
    assert judge(Grant(GRANT, is_claimed=is_claimed), report) is verdict


def test_slot_held_by_a_lease_without_a_grant_is_noticed() -> None:
    held = registry_pb2.SlotReport(state=OCCUPIED, fencing_number=1, lease_id="x")
    assert judge(None, held) is Verdict.UNKNOWN_LEASE
    assert judge(None, registry_pb2.SlotReport(state=CLEANING, lease_id="x")) is Verdict.NOTHING
