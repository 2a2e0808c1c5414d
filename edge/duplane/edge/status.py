"""What /status tells, from what the scheduler lists. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2

_REQUEST_TYPES = {
    lease_pb2.SESSION_KIND_AUDIO_DUPLEX: "audio_duplex",
    lease_pb2.SESSION_KIND_OMNI_DUPLEX: "omni_duplex",
    lease_pb2.SESSION_KIND_CHAT: "chat",
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


def _worker_state(worker: admin_pb2.WorkerStatus, leases: Iterable[admin_pb2.LeaseStatus]) -> str:
    """Return the one word the reference has for a worker: it knew one session per worker."""
    slots = worker.worker.slots
    kinds = {
        lease.claims.kind for lease in leases if lease.claims.worker_id == worker.worker.worker_id
    }
    if slots and all(slot.state in _UNLEASABLE for slot in slots):
        return "error"
    if worker.is_draining:
        return "offline"
    if kinds - {lease_pb2.SESSION_KIND_CHAT}:
        return "duplex"
    if kinds or any(slot.state != registry_pb2.SLOT_STATE_FREE for slot in slots):
        return "busy"
    return "idle"


def fabric_status(
    workers: admin_pb2.ListWorkersResponse,
    leases: admin_pb2.ListLeasesResponse,
    tickets: admin_pb2.ListTicketsResponse,
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
        "running_tasks": [_running_task(lease) for lease in leases.leases],
        "slot_count": sum(len(worker.worker.slots) for worker in workers.workers),
        "free_slot_count": free_slots(workers.workers, leases.leases),
        "lease_count": len(leases.leases),
        "ticket_count": len(tickets.tickets),
    }


def unknown_status() -> dict[str, object]:
    """Return the same keys when no scheduler answers."""
    status = fabric_status(
        admin_pb2.ListWorkersResponse(),
        admin_pb2.ListLeasesResponse(),
        admin_pb2.ListTicketsResponse(),
    )
    return {**status, "gateway_healthy": False}


def _running_task(lease: admin_pb2.LeaseStatus) -> dict[str, object]:
    is_estimated = lease.HasField("estimated_remaining")
    return {
        "worker_id": lease.claims.worker_id,
        "slot": lease.claims.slot,
        "request_type": _REQUEST_TYPES.get(lease.claims.kind, "unknown"),
        "elapsed_s": lease.held_duration.ToMicroseconds() / 1e6,
        "estimated_remaining_s": (
            lease.estimated_remaining.ToMicroseconds() / 1e6 if is_estimated else None
        ),
    }
