"""The edge's plain HTTP answers."""

from __future__ import annotations

import pytest
from live_edge import begin, end, live_edge

STATUS_KEYS = {
    *("gateway_healthy", "total_workers", "idle_workers", "busy_workers", "duplex_workers"),
    *("loading_workers", "error_workers", "offline_workers", "queue_length", "max_queue_size"),
    *("running_tasks", "slot_count", "free_slot_count", "lease_count", "ticket_count"),
}


async def test_health_and_ready() -> None:
    async with live_edge() as edge:
        code, health = await edge.get("/health")
        assert (code, health["status"]) == (200, "healthy")
        assert (await edge.get("/ready"))[0] == 200


async def test_status_counts_slots_leases_and_sessions() -> None:
    async with live_edge(slot_count=3) as edge:
        async with edge.connect() as client:
            await begin(client)
            code, status = await edge.get("/status?verbose=1")
            assert code == 200
            assert set(status) > STATUS_KEYS
            counts = {key: status[key] for key in ("slot_count", "free_slot_count", "lease_count")}
            assert counts == {"slot_count": 3, "free_slot_count": 2, "lease_count": 1}
            assert status["edge_session_count"] == 1
            assert status["running_tasks"][0]["request_type"] == "audio_duplex"
            await end(client)
        await edge.settled()
        _, status = await edge.get("/status")
        assert (status["free_slot_count"], status["lease_count"]) == (3, 0)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/", 404),
        ("POST", "/nowhere", 404),
        ("POST", "/status", 405),
        ("DELETE", "/v1/realtime", 405),
    ],
)
async def test_what_is_not_served_is_refused_as_json(method: str, path: str, code: int) -> None:
    async with live_edge() as edge:
        answered, body = await edge.get(path, method)
        assert answered == code
        assert body["detail"]
