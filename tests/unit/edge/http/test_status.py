"""/status has the reference's format, in which a worker has one slot. Our workers have several."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration

from duplane.edge.http.status import (
    fabric_status,
    free_slots,
    is_serving,
    unknown_status,
    worker_health,
    worker_list,
)
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2

FREE = registry_pb2.SLOT_STATE_FREE
OCCUPIED = registry_pb2.SLOT_STATE_OCCUPIED
CLEANING = registry_pb2.SLOT_STATE_CLEANING
BROKEN = registry_pb2.SLOT_STATE_BROKEN
AUDIO = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
NOW = datetime(2026, 4, 27, 12, tzinfo=UTC)
CHAT = lease_pb2.SESSION_KIND_CHAT


def worker(name: str, *states: registry_pb2.SlotState, **flags: Any) -> admin_pb2.WorkerStatus:
    slots = [registry_pb2.SlotReport(slot=slot, state=state) for slot, state in enumerate(states)]
    register = registry_pb2.Register(worker_id=name, address="10.0.0.2:8020", slots=slots)
    return admin_pb2.WorkerStatus(worker=register, report_age=Duration(seconds=4), **flags)


def lease(name: str, slot: int, kind: lease_pb2.SessionKind = AUDIO) -> admin_pb2.LeaseStatus:
    claims = lease_pb2.LeaseClaims(worker_id=name, slot=slot, kind=kind)
    return admin_pb2.LeaseStatus(claims=claims, held_duration=Duration(seconds=3))


def status(
    workers: list[admin_pb2.WorkerStatus], leases: list[admin_pb2.LeaseStatus]
) -> dict[str, object]:
    return fabric_status(
        admin_pb2.ListWorkersResponse(workers=workers),
        admin_pb2.ListLeasesResponse(leases=leases),
        admin_pb2.ListTicketsResponse(tickets=[admin_pb2.TicketStatus()], ticket_limit=1000),
        NOW,
        has_ids=True,
    )


def test_a_slot_that_is_granted_and_not_claimed_yet_is_not_free() -> None:
    workers = [worker("w", FREE, FREE, OCCUPIED, CLEANING, BROKEN)]
    assert free_slots(workers, []) == 2
    assert free_slots(workers, [lease("w", 0), lease("other", 1)]) == 1


def test_slots_of_a_draining_worker_are_not_free() -> None:
    assert free_slots([worker("w", FREE, is_draining=True)], []) == 0


def test_a_worker_serves_while_a_slot_can_be_waited_for() -> None:
    assert is_serving(worker("w", BROKEN, OCCUPIED))
    assert is_serving(worker("w", CLEANING))
    assert not is_serving(worker("w", BROKEN))
    assert not is_serving(worker("w"))
    assert not is_serving(worker("w", FREE, is_draining=True))


@pytest.mark.parametrize("flag", ["is_silent", "is_unreachable"])
def test_worker_that_does_not_answer_is_offline_and_has_no_free_slots(flag: str) -> None:
    hung = worker("hung", FREE, **{flag: True})
    assert not is_serving(hung)
    assert free_slots([hung], []) == 0
    counted = status([hung], [])
    assert (counted["idle_workers"], counted["offline_workers"]) == (0, 1)
    listed = worker_list(
        admin_pb2.ListWorkersResponse(workers=[hung]), admin_pb2.ListLeasesResponse(), NOW
    )
    (row,) = cast("list[dict[str, object]]", listed["workers"])
    assert row["status"] == "offline"
    assert row["last_heartbeat"] == (NOW - timedelta(seconds=4)).isoformat()


def test_lost_worker_is_an_error_and_is_listed_with_its_last_sessions() -> None:
    lost = worker(
        "lost",
        *(OCCUPIED, FREE),
        is_silent=True,
        lost_duration=Duration(seconds=30),
        lost_reason="it is gone",
    )
    lost.worker.slots[0].session_id = "s1"
    lost.worker.slots[0].kind = AUDIO
    told = status([lost, worker("w", FREE)], [])
    assert (told["total_workers"], told["error_workers"], told["lost_worker_count"]) == (2, 1, 1)
    assert (told["slot_count"], told["free_slot_count"]) == (1, 1)
    listed = worker_list(
        admin_pb2.ListWorkersResponse(workers=[lost]), admin_pb2.ListLeasesResponse(), NOW
    )
    (row,) = cast("list[dict[str, object]]", listed["workers"])
    assert (row["status"], row["lost_s"], row["lost_reason"]) == ("error", 30, "it is gone")
    assert row["last_sessions"] == [{"session_id": "s1", "slot": 0, "request_type": "audio_duplex"}]
    assert row["sessions"] == [], "sessions of a lost worker run elsewhere, or have ended"


def test_every_worker_is_counted_once() -> None:
    workers = [
        worker("idle", FREE, FREE),
        worker("has room", OCCUPIED, BROKEN, FREE),
        worker("talks", OCCUPIED, CLEANING, BROKEN),
        worker("is granted", FREE),
        worker("chats", OCCUPIED),
        worker("cleans", CLEANING),
        worker("broken", BROKEN),
        worker("drains", OCCUPIED, is_draining=True),
    ]
    duplex = [lease(name, 0) for name in ("has room", "talks", "is granted", "drains")]
    told = status(workers, [*duplex, lease("chats", 0, CHAT)])
    assert {key: told[key] for key in told if str(key).endswith("_workers")} == {
        "total_workers": 8,
        "idle_workers": 2,
        "busy_workers": 2,
        "duplex_workers": 2,
        "loading_workers": 0,
        "error_workers": 1,
        "offline_workers": 1,
    }
    assert (told["slot_count"], told["free_slot_count"]) == (13, 3)
    assert (told["queue_length"], told["ticket_count"], told["max_queue_size"]) == (1, 1, 1000)


def test_a_lease_is_a_running_task() -> None:
    told = status([worker("w", OCCUPIED)], [lease("w", 0)])
    assert told["running_tasks"] == [
        {
            "worker_id": "w",
            "slot": 0,
            "request_type": "audio_duplex",
            "started_at": "2026-04-27T11:59:57+00:00",
            "elapsed_s": 3.0,
            "estimated_remaining_s": 0.0,
        }
    ]


def test_an_unknown_fabric_has_the_same_keys_and_nothing_in_them() -> None:
    unknown = unknown_status(NOW)
    assert unknown.keys() == status([], []).keys()
    assert not any(unknown.values())


def test_health_of_all_workers_is_told_as_of_one() -> None:
    told = [
        worker_health([worker("w", OCCUPIED), worker("v", FREE)], []),
        worker_health([worker("w", FREE)], [lease("w", 0)]),
        worker_health([worker("w", BROKEN)], []),
        worker_health([], []),
    ]
    assert told == [
        {"model_loaded": True, "worker_status": "idle"},
        {"model_loaded": True, "worker_status": "busy"},
        {"model_loaded": False, "worker_status": "offline"},
        {"model_loaded": False, "worker_status": "offline"},
    ]
