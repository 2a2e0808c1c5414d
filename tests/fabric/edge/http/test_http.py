"""The edge's plain HTTP answers."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from support.edge.live_edge import begin, end, live_edge
from support.fabric.in_process import running_edge

STATUS_KEYS = {
    *("gateway_healthy", "total_workers", "idle_workers", "busy_workers", "duplex_workers"),
    *("loading_workers", "error_workers", "offline_workers", "queue_length", "max_queue_size"),
    *("running_tasks", "slot_count", "free_slot_count", "lease_count", "ticket_count"),
}


async def test_health_and_ready() -> None:
    async with live_edge() as edge:
        code, health = await edge.get("/health")
        assert (code, health["status"]) == (200, "healthy")
        assert (health["model_loaded"], health["worker_status"]) == (True, "idle")
        assert (await edge.get("/ready"))[0] == 200


async def test_process_lives_while_no_scheduler_answers() -> None:
    accepted = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with silent:
        async with (
            running_edge(address) as edge,
            aiohttp.ClientSession() as client,
            client.get(f"http://{edge.address}/health") as response,
        ):
            health = await response.json()
            assert response.status == 200
        assert accepted.is_set()
    assert (health["status"], health["worker_status"]) == ("healthy", "offline")
    assert health["model_loaded"] is False


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
        ("GET", "/pages/", 404),
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
