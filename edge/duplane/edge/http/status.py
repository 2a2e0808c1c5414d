"""Status answers, made from the scheduler's lists in the reference server's format. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta

from google.protobuf.duration_pb2 import Duration

from duplane.edge.dialects.dialect import NO_WORKER
from duplane.fabric.addresses import parse_address
from duplane.fabric.durations import to_seconds
from duplane.fabric.kinds import kind_name
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2

# State of a worker as `/status` counts it -> the name of this state in `/workers`.
_WORKER_STATUSES = {
    "idle": "idle",
    "busy": "busy_chat",
    "duplex": "duplex_active",
    "error": "error",
    "offline": "offline",
}
_UNLEASABLE = (registry_pb2.SLOT_STATE_BROKEN, registry_pb2.SLOT_STATE_UNSPECIFIED)


def is_serving(worker: admin_pb2.WorkerStatus) -> bool:
    """Return whether a slot of this worker can be leased, now or after a wait."""
    is_absent = worker.is_draining or worker.is_silent or worker.is_unreachable
    return not is_absent and any(slot.state not in _UNLEASABLE for slot in worker.worker.slots)


def unready_reason(workers: admin_pb2.ListWorkersResponse) -> str:
    """Return why a new session would get no slot, not even after a wait; empty if it would."""
    if workers.store_refusal or any(map(is_serving, workers.workers)):
        return workers.store_refusal
    return NO_WORKER


def is_lost(worker: admin_pb2.WorkerStatus) -> bool:
    """Return whether a worker is listed although it is no longer attached."""
    return worker.HasField("lost_duration")


def free_slots(
    workers: Iterable[admin_pb2.WorkerStatus], leases: Iterable[admin_pb2.LeaseStatus]
) -> int:
    """Count the slots that can be leased now: clean, not granted, on a serving worker."""
    granted = {(lease.claims.worker_id, lease.claims.slot) for lease in leases}
    return sum(
        slot.state == registry_pb2.SLOT_STATE_FREE
        and (worker.worker.worker_id, slot.slot) not in granted
        for worker in workers
        if is_serving(worker)
        for slot in worker.worker.slots
    )


def worker_health(
    workers: Sequence[admin_pb2.WorkerStatus], leases: Sequence[admin_pb2.LeaseStatus]
) -> dict[str, object]:
    """Return the health fields of a worker.

    The reference has only one worker; here the fields summarise all workers.
    """
    is_loaded = any(map(is_serving, workers))
    status = "idle" if free_slots(workers, leases) else "busy" if is_loaded else "offline"
    return {"model_loaded": is_loaded, "worker_status": status}


def _worker_state(worker: admin_pb2.WorkerStatus, leases: Collection[admin_pb2.LeaseStatus]) -> str:
    """Return the state of a worker in the words of the reference, whose workers run one session.

    Web pages show the number of idle workers to people who may begin a session. So a worker counts
    as idle if a session can begin there now. Otherwise, the kinds of its leases decide its state.
    """
    slots = worker.worker.slots
    kinds = {
        lease.claims.kind for lease in leases if lease.claims.worker_id == worker.worker.worker_id
    }
    if is_lost(worker) or (slots and all(slot.state in _UNLEASABLE for slot in slots)):
        return "error"
    if not is_serving(worker):
        return "offline"
    if free_slots([worker], leases):
        return "idle"
    return "duplex" if kinds - {lease_pb2.SESSION_KIND_CHAT} else "busy"


def _worker_status(
    worker: admin_pb2.WorkerStatus, leases: Collection[admin_pb2.LeaseStatus]
) -> str:
    """Return the state of a worker in the words of `/workers`, which include pauses.

    A worker is paused if no session can begin there and each of its sessions is paused.
    """
    state = _worker_state(worker, leases)
    held = [slot for slot in worker.worker.slots if slot.state == registry_pb2.SLOT_STATE_OCCUPIED]
    if state == "duplex" and held and all(slot.is_paused for slot in held):
        return "duplex_paused"
    return _WORKER_STATUSES[state]


def fabric_status(
    workers: admin_pb2.ListWorkersResponse,
    leases: admin_pb2.ListLeasesResponse,
    tickets: admin_pb2.ListTicketsResponse,
    now: datetime,
    *,
    has_ids: bool,
) -> dict[str, object]:
    """Return `/status`: the keys that monitors of the reference expect, and our own counts.

    Only with `has_ids` the answer names workers.
    """
    states = [_worker_state(worker, leases.leases) for worker in workers.workers]
    counted = ("idle", "busy", "duplex", "loading", "error", "offline")
    return {
        "gateway_healthy": not workers.store_refusal,
        "total_workers": len(states),
        **{f"{state}_workers": states.count(state) for state in counted},
        "queue_length": len(tickets.tickets),
        "max_queue_size": tickets.ticket_limit,
        "running_tasks": [_running_task(lease, now, has_ids) for lease in leases.leases],
        "lost_worker_count": sum(map(is_lost, workers.workers)),
        "slot_count": sum(
            len(worker.worker.slots) for worker in workers.workers if not is_lost(worker)
        ),
        "free_slot_count": free_slots(workers.workers, leases.leases),
        "lease_count": len(leases.leases),
        "ticket_count": len(tickets.tickets),
        "store_refusal": workers.store_refusal,
    }


def unknown_status(now: datetime) -> dict[str, object]:
    """Return the keys of `/status` for a fabric whose scheduler does not answer."""
    status = fabric_status(
        admin_pb2.ListWorkersResponse(),
        admin_pb2.ListLeasesResponse(),
        admin_pb2.ListTicketsResponse(),
        now,
        has_ids=False,
    )
    return {**status, "gateway_healthy": False}


def worker_list(
    workers: admin_pb2.ListWorkersResponse, leases: admin_pb2.ListLeasesResponse, now: datetime
) -> dict[str, object]:
    """Return `/workers`: for each worker the keys that the reference has, then our own."""
    held: defaultdict[str, list[admin_pb2.LeaseStatus]] = defaultdict(list)
    for lease in leases.leases:
        held[lease.claims.worker_id].append(lease)
    rows = [_worker(worker, held[worker.worker.worker_id], now) for worker in workers.workers]
    return {"total": len(rows), "workers": rows}


def cache_list(
    workers: admin_pb2.ListWorkersResponse, leases: admin_pb2.ListLeasesResponse
) -> dict[str, object]:
    """Return `/cache`."""
    return {
        "workers": [
            {
                "worker_id": worker.worker.worker_id,
                "status": _worker_status(worker, leases.leases),
            }
            for worker in workers.workers
        ]
    }


def queue_status(
    leases: admin_pb2.ListLeasesResponse,
    tickets: admin_pb2.ListTicketsResponse,
    now: datetime,
    *,
    has_ids: bool,
) -> dict[str, object]:
    """Return `/api/queue`. Only with `has_ids` the answer names tickets, sessions and workers."""
    return {
        "queue_length": len(tickets.tickets),
        "max_queue_size": tickets.ticket_limit,
        "items": [
            {**_ticket(ticket, now, has_ids), "wait_elapsed_s": to_seconds(ticket.waited_duration)}
            for ticket in tickets.tickets
        ],
        "running_tasks": [_running_task(lease, now, has_ids) for lease in leases.leases],
    }


def ticket_status(
    tickets: admin_pb2.ListTicketsResponse, ticket_id: str, now: datetime, *, has_ids: bool
) -> dict[str, object]:
    """Return `/api/queue/{ticket}`. Only with `has_ids` the answer names the session."""
    for ticket in tickets.tickets:
        if ticket.ticket_id == ticket_id:
            row = {**_ticket(ticket, now, has_ids), "ticket_id": ticket_id, "cancelled": False}
            return {"found": True, "ticket": row}
    return {
        "found": False,
        "message": "Ticket not in queue (may have been assigned or cancelled)",
    }


def _worker(
    worker: admin_pb2.WorkerStatus, leases: Sequence[admin_pb2.LeaseStatus], now: datetime
) -> dict[str, object]:
    """Return the object of a worker in `/workers`.

    The reference has one session per worker. Here, the keys about this session describe the oldest
    session of the worker.
    """
    register = worker.worker
    lease = leases[0] if leases else None
    address = parse_address(register.address)
    device, _, index = register.device.name.partition(":")
    return {
        "worker_id": register.worker_id,
        "host": address.host,
        "port": address.port,
        "gpu_id": (int(index) if index.isdecimal() else 0) if device == "cuda" else -1,
        "status": _worker_status(worker, leases),
        "current_session_id": (lease.claims.session_id or None) if lease else None,
        "total_requests": worker.report.unit_count,
        "avg_inference_time_ms": to_seconds(worker.report.unit_time) * 1e3,
        "last_heartbeat": _ago(now, worker.report_age),
        "current_request_type": kind_name(lease.claims.kind) if lease else None,
        "task_started_at": _ago(now, lease.held_duration) if lease else None,
        "is_draining": worker.is_draining,
        "is_silent": worker.is_silent,
        "is_unreachable": worker.is_unreachable,
        "lost_s": to_seconds(worker.lost_duration) if is_lost(worker) else None,
        "lost_reason": worker.lost_reason or None,
        "last_sessions": _last_sessions(worker) if is_lost(worker) else [],
        "sessions": [_session(lease, register.slots, now) for lease in leases],
    }


def _session(
    lease: admin_pb2.LeaseStatus, slots: Sequence[registry_pb2.SlotReport], now: datetime
) -> dict[str, object]:
    held = [slot for slot in slots if slot.lease_id == lease.claims.lease_id]
    return {
        "session_id": lease.claims.session_id or None,
        "slot": lease.claims.slot,
        "request_type": kind_name(lease.claims.kind),
        "started_at": _ago(now, lease.held_duration),
        "is_paused": any(slot.is_paused for slot in held),
        "cannot_move": any(slot.cannot_move for slot in held),
    }


def _last_sessions(lost: admin_pb2.WorkerStatus) -> list[dict[str, object]]:
    """Return the sessions that a lost worker has reported last. They have ended or moved."""
    return [
        {
            "session_id": slot.session_id or None,
            "slot": slot.slot,
            "request_type": kind_name(slot.kind),
        }
        for slot in lost.worker.slots
        if slot.state == registry_pb2.SLOT_STATE_OCCUPIED
    ]


def _ticket(ticket: admin_pb2.TicketStatus, now: datetime, has_ids: bool) -> dict[str, object]:
    return {
        "ticket_id": ticket.ticket_id if has_ids else None,
        "request_type": kind_name(ticket.kind),
        "session_id": (ticket.session_id or None) if has_ids else None,
        "position": ticket.position,
        "estimated_wait_s": to_seconds(ticket.estimated_wait),  # 0 if unknown
        "enqueued_at": _ago(now, ticket.waited_duration),
        **({} if ticket.HasField("estimated_wait") else {"reason": NO_WORKER}),
    }


def _running_task(lease: admin_pb2.LeaseStatus, now: datetime, has_ids: bool) -> dict[str, object]:
    return {
        "worker_id": lease.claims.worker_id if has_ids else None,
        "slot": lease.claims.slot if has_ids else None,
        "request_type": kind_name(lease.claims.kind),
        "started_at": _ago(now, lease.held_duration),
        "elapsed_s": to_seconds(lease.held_duration),
        "estimated_remaining_s": to_seconds(lease.estimated_remaining),  # 0 if unknown
    }


def _ago(now: datetime, duration: Duration) -> str:
    return (now - timedelta(seconds=to_seconds(duration))).isoformat()
