"""The tables and the JSON of `duplane status`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from duplane.fabric.durations import to_seconds
from duplane.fabric.kinds import kind_name
from duplane.fabric.v1 import admin_pb2, registry_pb2
from duplane.tools.bench.report import table
from duplane.tools.operators.snapshots import SchedulerView, merge

_SLOT_STATES = {
    registry_pb2.SLOT_STATE_OCCUPIED: "occupied",
    registry_pb2.SLOT_STATE_CLEANING: "cleaning",
    registry_pb2.SLOT_STATE_BROKEN: "broken",
}
_LEASABLE = (
    registry_pb2.SLOT_STATE_FREE,
    registry_pb2.SLOT_STATE_OCCUPIED,
    registry_pb2.SLOT_STATE_CLEANING,
)
_NO_WORKER = "; no worker serves, so sessions wait"
_SLOT_COLUMNS = ("free", "withheld", "granted", "occupied", "cleaning", "broken", "unavailable")


def fabric_tables(views: Sequence[SchedulerView], row_limit: int) -> str:
    """Return tables of schedulers, workers, leases and queue, of at most `row_limit` rows each."""
    state = merge(views)
    unmovable = {
        slot.lease_id
        for status in state.workers
        for slot in status.worker.slots
        if slot.cannot_move
    }
    leases = {(lease.claims.worker_id, lease.claims.slot): lease for lease in state.leases}
    serves = any(
        _worker_state(worker) == "ready" and any(slot.state in _LEASABLE for slot in slots)
        for worker in state.workers
        if (slots := worker.worker.slots)
    )
    parts = (
        (
            "schedulers",
            ("scheduler", "state", "workers", "leases", "waiting"),
            map(_scheduler, views),
        ),
        (
            f"workers: {len(state.workers)}{'' if serves else _NO_WORKER}",
            ("worker", "state", *_SLOT_COLUMNS, "pool", "labels", "release", "address"),
            (_worker(worker, leases) for worker in state.workers),
        ),
        (
            f"leases: {len(state.leases)}",
            ("session", "worker", "slot", "kind", "state", "held s", "left s"),
            (_lease(lease, unmovable) for lease in state.leases),
        ),
        (
            f"waiting: {len(state.tickets)} of at most {state.ticket_limit}",
            ("session", "position", "kind", "pool", "needs", "tenant", "waited s", "left s"),
            map(_ticket, state.tickets),
        ),
    )
    return "".join(_bounded(title, header, list(rows), row_limit) for title, header, rows in parts)


def fabric_json(views: Sequence[SchedulerView]) -> dict[str, Any]:
    """Return the whole state as JSON, with the field names of the contract."""
    schedulers = [
        {
            "address": view.address,
            "failure": view.failure,
            "store_refusal": view.snapshot.store_refusal,
        }
        for view in views
    ]
    state = MessageToDict(
        merge(views), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {"schedulers": schedulers, **state}


def _bounded(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], row_limit: int
) -> str:
    hidden_count = max(0, len(rows) - row_limit)
    note = f"; {hidden_count} more are not shown" if hidden_count else ""
    return table(f"{title}{note}", header, rows[:row_limit])


def _scheduler(view: SchedulerView) -> Sequence[str]:
    seen = view.snapshot
    counts = (len(seen.workers), len(seen.leases), len(seen.tickets))
    state = view.failure or seen.store_refusal or "answers"
    return (view.address, state, *map(str, counts))


def _worker(
    status: admin_pb2.WorkerStatus, leases: Mapping[tuple[str, int], admin_pb2.LeaseStatus]
) -> Sequence[str]:
    """Return the row of a worker; `leases` has the leases by worker id and slot."""
    register = status.worker
    state = _worker_state(status)
    counts = Counter(
        _slot_state(slot, state == "ready", leases.get((register.worker_id, slot.slot)))
        for slot in register.slots
    )
    slots = (str(counts[name]) for name in _SLOT_COLUMNS)
    words = (register.pool or "-", _pairs(register.labels), register.release or "-")
    return (register.worker_id, state, *slots, *words, register.address)


def _worker_state(status: admin_pb2.WorkerStatus) -> str:
    states = (
        (status.HasField("lost_duration"), "lost"),
        (status.is_unreachable, "unreachable"),
        (status.is_silent, "silent"),
        (status.is_draining, "draining"),
    )
    return next((name for is_so, name in states if is_so), "ready")


def _slot_state(
    slot: registry_pb2.SlotReport, is_ready: bool, lease: admin_pb2.LeaseStatus | None
) -> str:
    """Return the column that counts a slot, by the rule of the metric `duplane_slots`."""
    if slot.state in _SLOT_STATES:
        return _SLOT_STATES[slot.state]
    if lease:
        return "occupied" if lease.is_claimed else "granted"
    if not is_ready:
        return "unavailable"
    return "withheld" if slot.is_withheld else "free"


def _lease(lease: admin_pb2.LeaseStatus, unmovable: Collection[str]) -> Sequence[str]:
    """Return the row of a lease; `unmovable` has the leases whose sessions cannot move."""
    claims = lease.claims
    is_fixed = claims.lease_id in unmovable
    state = "cannot move" if is_fixed else "claimed" if lease.is_claimed else "granted"
    return (
        claims.session_id or claims.lease_id,
        claims.worker_id,
        str(claims.slot),
        kind_name(claims.kind),
        state,
        f"{to_seconds(lease.held_duration):.0f}",
        f"{to_seconds(lease.estimated_remaining):.0f}",
    )


def _ticket(ticket: admin_pb2.TicketStatus) -> Sequence[str]:
    left_s = to_seconds(ticket.estimated_wait)
    return (
        ticket.session_id or ticket.ticket_id,
        str(ticket.position),
        kind_name(ticket.kind),
        ticket.pool or "-",
        _pairs(ticket.needs),
        ticket.tenant_id or "-",
        f"{to_seconds(ticket.waited_duration):.0f}",
        f"{left_s:.0f}" if ticket.HasField("estimated_wait") else "-",
    )


def _pairs(labels: Any) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items())) or "-"
