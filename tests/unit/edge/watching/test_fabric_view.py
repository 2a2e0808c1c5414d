"""The view of a fabric: snapshots in parts, changes, and bounds."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from duplane.edge.watching import fabric_view
from duplane.edge.watching.fabric_view import FabricView
from duplane.fabric.durations import to_duration
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2

NOW_S = 1_714_200_000.0


def note(view: FabricView, **event: Any) -> bool:
    """Note an event; return whether a whole snapshot has replaced all."""
    return any([*view.note(admin_pb2.WatchResponse(**event), NOW_S)])


def lease(number: int, **fields: Any) -> admin_pb2.LeaseStatus:
    claims = lease_pb2.LeaseClaims(
        lease_id=f"l{number}", worker_id="w", session_id=f"sess_{number}", holder=b"secret"
    )
    return admin_pb2.LeaseStatus(claims=claims, **fields)


def worker(worker_id: str = "w", slot_count: int = 2, **fields: Any) -> admin_pb2.WorkerStatus:
    register = registry_pb2.Register(
        worker_id=worker_id,
        incarnation="secret",
        slots=[
            registry_pb2.SlotReport(slot=slot, state=registry_pb2.SLOT_STATE_FREE)
            for slot in range(slot_count)
        ],
    )
    return admin_pb2.WorkerStatus(worker=register, **fields)


def changes(view: FabricView) -> dict[str, Any]:
    return orjson.loads(view.changes() or b"{}")


def snapshot(view: FabricView) -> dict[str, Any]:
    view.changes()
    return orjson.loads(view.snapshot())


def test_snapshot_is_shown_when_its_last_part_has_come() -> None:
    view = FabricView()
    first = admin_pb2.Snapshot(workers=[worker()], ticket_limit=7, has_more=True)
    assert not note(view, snapshot=first)
    assert snapshot(view)["is_known"] is False
    assert snapshot(view)["workers"] == []
    assert note(view, snapshot=admin_pb2.Snapshot(leases=[lease(1)]))
    seen = snapshot(view)
    assert [one["worker_id"] for one in seen["workers"]] == ["w"]
    assert [one["lease_id"] for one in seen["leases"]] == ["l1"]
    assert (seen["is_known"], seen["ticket_limit"]) == (True, 7)
    assert note(view, snapshot=admin_pb2.Snapshot())
    assert snapshot(view)["workers"] == []


def test_object_that_changes_often_is_sent_once() -> None:
    view = FabricView()
    note(view, snapshot=admin_pb2.Snapshot())
    for is_claimed in (False, True):
        note(view, lease=lease(1, is_claimed=is_claimed))
    note(view, lease=lease(2))
    note(view, removed_lease_id="l2")
    note(view, removed_lease_id="never known")
    seen = changes(view)
    assert [one["is_claimed"] for one in seen["leases"]] == [True]
    assert seen["removed_leases"] == ["l2"]
    assert changes(view) == {}


def test_rows_have_times_instead_of_ages_and_no_secret() -> None:
    view = FabricView()
    note(view, snapshot=admin_pb2.Snapshot(workers=[worker(report_age=to_duration(3))]))
    note(view, lease=lease(1, held_duration=to_duration(60)))
    assert b"secret" not in view.changes() + view.snapshot()
    seen = snapshot(view)
    assert seen["leases"][0]["granted_at"] == NOW_S - 60
    assert seen["leases"][0]["ends_at"] is None
    assert seen["workers"][0]["reported_at"] == NOW_S - 3


def test_lost_worker_has_no_slots_to_lease() -> None:
    view = FabricView()
    note(view, snapshot=admin_pb2.Snapshot(workers=[worker("a"), worker("b", 3)]))
    assert view.counts()["slots"] == 5
    lost = worker("b", 3, lost_duration=to_duration(1), lost_reason="its stream broke")
    note(view, worker=lost)
    assert view.counts()["slots"] == 2
    assert snapshot(view)["workers"][1]["lost_at"] == NOW_S - 1
    note(view, removed_worker_id="b")
    assert len(snapshot(view)["workers"]) == 1


def test_view_keeps_no_more_than_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_view, "MAX_LEASES", 3)
    view = FabricView()
    for number in range(5):
        note(view, lease=lease(number))
    assert len(snapshot(view)["leases"]) == 3
    assert snapshot(view)["cut"] == ["leases"]
    note(view, removed_lease_id="l4")
    assert changes(view) == {}
    note(view, lease=lease(1, is_claimed=True))
    assert changes(view)["leases"][0]["is_claimed"] is True
