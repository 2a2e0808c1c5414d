"""What operators are told, from what the scheduler lists, in the words of the reference. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta

from google.protobuf.duration_pb2 import Duration

from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2

_REQUEST_TYPES = {
    lease_pb2.SESSION_KIND_AUDIO_DUPLEX: "audio_duplex",
    lease_pb2.SESSION_KIND_OMNI_DUPLEX: "omni_duplex",
    lease_pb2.SESSION_KIND_CHAT: "chat",
}
# How `/workers` calls what `/status` counts.
_WORKER_STATUSES = {
    "idle": "idle",
    "busy": "busy_chat",
    "duplex": "duplex_active",
    "error": "error",
    "offline": "offline",
}
_UNLEASABLE = (registry_pb2.SLOT_STATE_BROKEN, registry_pb2.SLOT_STATE_UNSPECIFIED)


def is_serving(worker: admin_pb2.WorkerStatus) -> bool:
    """Tell whether a slot of this worker can be leased, now or after a wait."""
    return not worker.is_draining and any(
        slot.state not in _UNLEASABLE for slot in worker.worker.slots
    )


def free_slots(
    workers: Iterable[admin_pb2.WorkerStatus], leases: Iterable[admin_pb2.LeaseStatus]
) -> int:
    """Count slots that can be leased this moment: clean, not granted, on workers that serve."""
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
    """Return what the reference's worker said of itself, of all workers as if they were one."""
    is_loaded = any(map(is_serving, workers))
    status = "idle" if free_slots(workers, leases) else "busy" if is_loaded else "offline"
    return {"model_loaded": is_loaded, "worker_status": status}


def _worker_state(worker: admin_pb2.WorkerStatus, leases: Collection[admin_pb2.LeaseStatus]) -> str:
    """Return the one word the reference has for a worker: it knew one session per worker.

    Its pages show how many are idle to people who want to begin: idle is where a session can, at
    once, whatever else runs there. The others are called by what fills them.
    """
    slots = worker.worker.slots
    kinds = {
        lease.claims.kind for lease in leases if lease.claims.worker_id == worker.worker.worker_id
    }
    if slots and all(slot.state in _UNLEASABLE for slot in slots):
        return "error"
    if worker.is_draining:
        return "offline"
    if free_slots([worker], leases):
        return "idle"
    return "duplex" if kinds - {lease_pb2.SESSION_KIND_CHAT} else "busy"


def fabric_status(
    workers: admin_pb2.ListWorkersResponse,
    leases: admin_pb2.ListLeasesResponse,
    tickets: admin_pb2.ListTicketsResponse,
    now: datetime,
) -> dict[str, object]:
    """Return the keys that monitors of the reference read, and the fabric's own counts."""
    states = [_worker_state(worker, leases.leases) for worker in workers.workers]
    counted = ("idle", "busy", "duplex", "loading", "error", "offline")
    return {
        "gateway_healthy": True,
        "total_workers": len(states),
        **{f"{state}_workers": states.count(state) for state in counted},
        "queue_length": len(tickets.tickets),
        "max_queue_size": tickets.ticket_limit,
        "running_tasks": [_running_task(lease, now) for lease in leases.leases],
        "slot_count": sum(len(worker.worker.slots) for worker in workers.workers),
        "free_slot_count": free_slots(workers.workers, leases.leases),
        "lease_count": len(leases.leases),
        "ticket_count": len(tickets.tickets),
    }


def unknown_status(now: datetime) -> dict[str, object]:
    """Return the same keys when no scheduler answers."""
    status = fabric_status(
        admin_pb2.ListWorkersResponse(),
        admin_pb2.ListLeasesResponse(),
        admin_pb2.ListTicketsResponse(),
        now,
    )
    return {**status, "gateway_healthy": False}


def worker_list(
    workers: admin_pb2.ListWorkersResponse, leases: admin_pb2.ListLeasesResponse, now: datetime
) -> dict[str, object]:
    """Return `/workers`. What runs on a worker is told of its oldest session."""
    oldest: dict[str, admin_pb2.LeaseStatus] = {}
    for lease in leases.leases:
        oldest.setdefault(lease.claims.worker_id, lease)
    rows = [
        _worker(worker, _worker_state(worker, leases.leases), oldest, now)
        for worker in workers.workers
    ]
    return {"total": len(rows), "workers": rows}


def cache_list(
    workers: admin_pb2.ListWorkersResponse, leases: admin_pb2.ListLeasesResponse
) -> dict[str, object]:
    """Return `/cache`."""
    return {
        "workers": [
            {
                "worker_id": worker.worker.worker_id,
                "status": _WORKER_STATUSES[_worker_state(worker, leases.leases)],
            }
            for worker in workers.workers
        ]
    }


def queue_status(
    leases: admin_pb2.ListLeasesResponse, tickets: admin_pb2.ListTicketsResponse, now: datetime
) -> dict[str, object]:
    """Return `/api/queue`."""
    return {
        "queue_length": len(tickets.tickets),
        "max_queue_size": tickets.ticket_limit,
        "items": [
            {**_ticket(ticket, now), "wait_elapsed_s": _seconds(ticket.waited_duration)}
            for ticket in tickets.tickets
        ],
        "running_tasks": [_running_task(lease, now) for lease in leases.leases],
    }


def ticket_status(
    tickets: admin_pb2.ListTicketsResponse, ticket_id: str, now: datetime
) -> dict[str, object]:
    """Return `/api/queue/{ticket}`."""
    for ticket in tickets.tickets:
        if ticket.ticket_id == ticket_id:
            return {"found": True, "ticket": {**_ticket(ticket, now), "cancelled": False}}
    return {
        "found": False,
        "message": "Ticket not in queue (may have been assigned or cancelled)",
    }


def _worker(
    worker: admin_pb2.WorkerStatus,
    state: str,
    oldest: dict[str, admin_pb2.LeaseStatus],
    now: datetime,
) -> dict[str, object]:
    register, lease = worker.worker, oldest.get(worker.worker.worker_id)
    host, _, port = register.address.rpartition(":")
    device, _, index = register.device.name.partition(":")
    return {
        "worker_id": register.worker_id,
        "host": host,
        "port": int(port) if port.isdecimal() else 0,
        "gpu_id": (int(index) if index.isdecimal() else 0) if device == "cuda" else -1,
        "status": _WORKER_STATUSES[state],
        "current_session_id": (lease.claims.session_id or None) if lease else None,
        "total_requests": worker.report.unit_count,
        "avg_inference_time_ms": _seconds(worker.report.unit_time) * 1e3,
        # A worker that is listed is attached: its connection is its heartbeat.
        "last_heartbeat": now.isoformat(),
        "current_request_type": _request_type(lease.claims.kind) if lease else None,
        "task_started_at": _ago(now, lease.held_duration) if lease else None,
    }


def _ticket(ticket: admin_pb2.TicketStatus, now: datetime) -> dict[str, object]:
    return {
        "ticket_id": ticket.ticket_id,
        "request_type": _request_type(ticket.kind),
        "session_id": ticket.session_id or None,
        "position": ticket.position,
        "estimated_wait_s": _seconds(ticket.estimated_wait),  # 0 when nothing is known
        "enqueued_at": _ago(now, ticket.waited_duration),
    }


def _running_task(lease: admin_pb2.LeaseStatus, now: datetime) -> dict[str, object]:
    return {
        "worker_id": lease.claims.worker_id,
        "slot": lease.claims.slot,
        "request_type": _request_type(lease.claims.kind),
        "started_at": _ago(now, lease.held_duration),
        "elapsed_s": _seconds(lease.held_duration),
        "estimated_remaining_s": _seconds(lease.estimated_remaining),  # 0 when nothing is known
    }


def _request_type(kind: lease_pb2.SessionKind) -> str:
    return _REQUEST_TYPES.get(kind, "unknown")


def _seconds(duration: Duration) -> float:
    return duration.ToMicroseconds() / 1e6


def _ago(now: datetime, duration: Duration) -> str:
    return (now - timedelta(microseconds=duration.ToMicroseconds())).isoformat()
