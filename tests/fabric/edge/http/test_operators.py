"""Queries and commands of operators to an edge with a real scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import soundfile
from support.edge.live_edge import UPDATE, Asked, closed, live_edge, receive, send
from support.fabric.in_process import running_edge
from support.scheduler.scheduler_harness import SchedulerHarness
from websockets.asyncio.client import connect

from duplane.fabric.errors import Reason
from duplane.fabric.v1 import registry_pb2

TOKEN = {"Authorization": "Bearer secret"}


@contextlib.asynccontextmanager
async def edge_over(*schedulers: str, **settings: Any) -> AsyncGenerator[Asked]:
    async with (
        running_edge(*schedulers, **settings) as edge,
        aiohttp.ClientSession() as client,
    ):
        yield Asked(edge.address, client)
        await edge.idle()


def is_near_now(told: str) -> bool:
    return abs(datetime.now(UTC) - datetime.fromisoformat(told)) < timedelta(seconds=30)


async def test_health_tells_a_time() -> None:
    async with SchedulerHarness.running() as scheduler, edge_over(scheduler.address) as edge:
        health = await edge.get("/health")
        assert health.keys() == {"status", "timestamp", "model_loaded", "worker_status"}
        assert is_near_now(health["timestamp"])


async def test_workers_are_told_as_the_reference_tells_them() -> None:
    async with SchedulerHarness.running() as scheduler, edge_over(scheduler.address) as edge:
        worker = await scheduler.worker(
            "w1", address="10.0.0.5:7000", device=registry_pb2.Device(name="cuda:3")
        )
        idle = await edge.get("/workers")
        assert is_near_now(idle["workers"][0].pop("last_heartbeat"))
        row = {
            "worker_id": "w1",
            "host": "10.0.0.5",
            "port": 7000,
            "gpu_id": 3,
            "status": "idle",
            "current_session_id": None,
            "total_requests": 0,
            "avg_inference_time_ms": 0.0,
            "current_request_type": None,
            "task_started_at": None,
            "is_draining": False,
            "is_silent": False,
            "is_unreachable": False,
            "lost_s": None,
            "lost_reason": None,
            "last_sessions": [],
            "sessions": [],
        }
        assert idle == {"total": 1, "workers": [row]}
        granted = await (await scheduler.caller(session_id="s1")).granted()
        await worker.claim(granted)
        (busy,) = (await edge.get("/workers"))["workers"]
        assert (busy["status"], busy["current_session_id"]) == ("duplex_active", "s1")
        assert busy["current_request_type"] == "audio_duplex"
        assert is_near_now(busy["task_started_at"])
        assert await edge.get("/cache") == {
            "workers": [{"worker_id": "w1", "status": "duplex_active"}]
        }


async def test_workers_show_a_paused_session_with_its_slot() -> None:
    async with SchedulerHarness.running() as scheduler, edge_over(scheduler.address) as edge:
        operator = await scheduler.operator()
        worker = await scheduler.worker("w1", slot_count=2)
        for session_id in ("first", "second"):
            await worker.claim(await (await scheduler.caller(session_id=session_id)).granted())
        slots = {slot.session_id: slot for slot in worker.slots}

        async def listed() -> tuple[str, dict[str, bool]]:
            """Report all slots; return the worker's status, and whether each session is paused."""
            await worker.report()
            await operator.until(lambda seen: list(seen.workers["w1"].worker.slots) == worker.slots)
            (row,) = (await edge.get("/workers"))["workers"]
            assert {each["slot"] for each in row["sessions"]} == {0, 1}
            assert all(is_near_now(each["started_at"]) for each in row["sessions"])
            assert all(each["request_type"] == "audio_duplex" for each in row["sessions"])
            return row["status"], {
                each["session_id"]: each["is_paused"] for each in row["sessions"]
            }

        assert await listed() == ("duplex_active", {"first": False, "second": False})
        slots["second"].is_paused = True
        assert await listed() == ("duplex_active", {"first": False, "second": True})
        slots["first"].is_paused = True
        assert await listed() == ("duplex_paused", {"first": True, "second": True})
        assert (await edge.get("/cache"))["workers"][0]["status"] == "duplex_paused"
        assert (await edge.get("/status"))["duplex_workers"] == 1
        slots["second"].is_paused = False
        assert await listed() == ("duplex_active", {"first": True, "second": False})


async def test_queue_tells_who_waits_and_what_runs() -> None:
    async with (
        SchedulerHarness.running(ticket_limit=9) as scheduler,
        edge_over(scheduler.address) as edge,
    ):
        worker = await scheduler.worker("w1")
        await worker.claim(await (await scheduler.caller()).granted())
        first, second = await scheduler.queue(2)
        told = await edge.get("/api/queue")
        assert (told["queue_length"], told["max_queue_size"]) == (2, 9)
        for place, item in enumerate(told["items"], 1):
            assert item.keys() == {
                *("ticket_id", "request_type", "session_id", "position", "estimated_wait_s"),
                *("enqueued_at", "wait_elapsed_s"),
            }
            assert (item["position"], item["request_type"]) == (place, "audio_duplex")
            assert 119 < item["estimated_wait_s"] / place <= 120
            assert 0 <= item["wait_elapsed_s"] < 30
            assert is_near_now(item["enqueued_at"])
        assert [item["ticket_id"] for item in told["items"]] == [first.ticket_id, second.ticket_id]
        (task,) = told["running_tasks"]
        assert (task["worker_id"], task["request_type"]) == ("w1", "audio_duplex")
        assert is_near_now(task["started_at"])
        assert 119 < task["elapsed_s"] + task["estimated_remaining_s"] < 121

        one = await edge.get(f"/api/queue/{second.ticket_id}")
        assert one["found"] is True
        assert one["ticket"].keys() == {
            *("ticket_id", "request_type", "session_id", "position", "estimated_wait_s"),
            *("enqueued_at", "cancelled"),
        }
        assert (one["ticket"]["position"], one["ticket"]["cancelled"]) == (2, False)
        none = await edge.get("/api/queue/q_0000000000000001")
        assert (none.keys(), none["found"]) == ({"found", "message"}, False)


async def test_no_worker_is_told_alike_by_ready_status_queue_and_events() -> None:
    async with SchedulerHarness.running() as scheduler, edge_over(scheduler.address) as edge:
        url = f"ws://{edge.address}/v1/realtime?mode=audio"
        async with connect(url, compression=None, proxy=None) as client:
            queued = await receive(client)
            code, ready = await edge.ask("GET", "/ready")
            status = await edge.get("/status")
            (item,) = (await edge.get("/api/queue"))["items"]
            told = [queued["reason"], ready["reason"], status["unready_reason"], item["reason"]]
            assert (code, told) == (503, ["no worker serves"] * 4)
        await scheduler.worker()
        assert (await edge.get("/status"))["unready_reason"] == ""


async def test_client_whose_ticket_is_cancelled_is_told_and_closed() -> None:
    async with SchedulerHarness.running() as scheduler, edge_over(scheduler.address) as edge:
        url = f"ws://{edge.address}/v1/realtime?mode=audio"
        async with connect(url, compression=None, proxy=None) as client:
            queued = await receive(client)
            assert queued["type"] == "session.queued"
            ticket = f"/api/queue/{queued['ticket_id']}"
            assert await edge.ask("DELETE", ticket) == (200, {"success": True})
            told = await receive(client)
            assert (told["type"], told["error"]["code"]) == ("error", "worker_busy")
            await closed(client, 1013)
        assert await edge.ask("DELETE", ticket) == (200, {"success": False})
        assert await edge.ask("DELETE", "/api/queue/nonsense") == (200, {"success": False})
        assert (await edge.get("/api/queue"))["items"] == []


async def test_session_is_ended_by_an_operator() -> None:
    async with live_edge() as live, live.asked() as edge:
        async with live.connect() as client:
            assert (await receive(client))["type"] == "session.queue_done"
            await send(client, UPDATE)
            created = await receive(client)
            path = f"/api/sessions/{created['session_id']}"
            assert await edge.ask("DELETE", path) == (200, {"success": True})
            assert await receive(client) == {"type": "session.closed", "reason": "server_shutdown"}
            await closed(client, 1001)
            assert client.close_reason == "ended by an operator"
        await live.until_session_count(0)
        code, told = await edge.ask("DELETE", path)
        assert (code, told) == (404, {"detail": "no session has this id"})


async def test_session_in_the_queue_is_ended_by_an_operator() -> None:
    async with SchedulerHarness.running() as scheduler, edge_over(scheduler.address) as edge:
        operator = await scheduler.operator()
        url = f"ws://{edge.address}/ws/duplex/adx_waits"
        async with connect(url, compression=None, proxy=None) as client:
            assert (await receive(client))["type"] == "queued"
            (ticket,) = operator.tickets.values()
            answer = await edge.ask("DELETE", f"/api/sessions/{ticket.session_id}")
            assert answer == (200, {"success": True})
            assert await receive(client) == {"type": "error", "error": "Server is shutting down"}
            await closed(client, 1001)
        await operator.until(lambda seen: not seen.tickets)


async def test_session_of_another_edge_is_ended_by_an_operator() -> None:
    async with SchedulerHarness.running() as scheduler, edge_over(scheduler.address) as edge:
        worker = await scheduler.worker("w1")
        granted = await (await scheduler.caller(session_id="sess_elsewhere")).granted()
        await worker.claim(granted)
        waiting = await scheduler.caller(session_id="sess_waits")
        await waiting.stands(1)
        answers = [
            await edge.ask("DELETE", f"/api/sessions/{session_id}")
            for session_id in ("sess_elsewhere", "sess_waits", "sess_unknown")
        ]
        assert [code for code, _ in answers] == [200, 200, 404]
        revoke = await worker.revoked()
        assert (revoke.lease_id, revoke.is_end) == (granted.lease_id, True)
        assert (await waiting.refused()).reason is Reason.TICKET_CANCELLED


async def test_only_operators_end_sessions() -> None:
    path = "/api/sessions/sess_0"
    async with SchedulerHarness.running() as scheduler:
        async with edge_over(scheduler.address) as edge:
            assert (await edge.ask("DELETE", path, headers={"Via": "a proxy"}))[0] == 403
            assert (await edge.ask("DELETE", path))[0] == 404
        async with edge_over(scheduler.address, admin_token="secret") as edge:
            assert (await edge.ask("DELETE", path))[0] == 403
            assert (await edge.ask("DELETE", path, headers=TOKEN))[0] == 404


async def test_estimates_are_changed_in_part() -> None:
    async with SchedulerHarness.running() as scheduler, edge_over(scheduler.address) as edge:
        before = await edge.get("/api/config/eta")
        assert before["config"]["eta_audio_duplex_s"] == 120.0
        change = {"eta_audio_duplex_s": 33, "ema_alpha": 0.5}
        code, after = await edge.ask("PUT", "/api/config/eta", json=change)
        assert code == 200
        config = {**before["config"], "eta_audio_duplex_s": 33.0, "ema_alpha": 0.5}
        assert after == {**before, "config": config, "ema_alpha": 0.5}
        assert await edge.get("/api/config/eta") == after
        for wrong in ('{"ema_alpha":2}', '{"eta_chat_s":"x"}', "{", ""):
            code, refused = await edge.ask("PUT", "/api/config/eta", data=wrong)
            assert (code, refused.keys()) == (422, {"detail"})
        assert await edge.get("/api/config/eta") == after
        code, _ = await edge.ask("PUT", "/api/config/eta", data=b" " * (64 * 1024 + 1))
        assert code == 413


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/api/queue/q_0000000000000001"), ("PUT", "/api/config/eta")]
)
async def test_only_operators_change_things(method: str, path: str) -> None:
    async with SchedulerHarness.running() as scheduler:
        body = {"json": {}} if method == "PUT" else {}
        async with edge_over(scheduler.address) as edge:
            assert (await edge.ask(method, path, **body))[0] == 200
            elsewhere = {"Host": "evil.example", "Origin": "https://evil.example"}
            proxied = dict.fromkeys(("X-Forwarded-For", "X-Real-IP", "Via"), "127.0.0.1")
            for name, value in (elsewhere | proxied).items():
                code, told = await edge.ask(method, path, headers={name: value}, **body)
                assert (code, told.keys()) == (403, {"detail"}), name
        async with edge_over(scheduler.address, trusted_proxies=("127.0.0.1",)) as edge:
            assert (await edge.ask(method, path, **body))[0] == 403
        async with edge_over(scheduler.address, admin_token="secret") as edge:
            assert (await edge.ask(method, path, **body))[0] == 403
            wrong = {"Authorization": "Bearer secre"}
            assert (await edge.ask(method, path, headers=wrong, **body))[0] == 403
            assert (await edge.ask(method, path, headers=TOKEN, **body))[0] == 200


async def test_what_clients_start_from(tmp_path: Path) -> None:
    voice = tmp_path / "anna.wav"
    soundfile.write(voice, np.zeros(1600, dtype=np.float32), 16_000)
    presets = tmp_path / "presets"
    (presets / "omni").mkdir(parents=True)
    (presets / "omni/a.json").write_text('{"name":"A"}')
    async with (
        SchedulerHarness.running() as scheduler,
        edge_over(scheduler.address, default_voice=voice, presets=presets) as edge,
    ):
        told = await edge.get("/api/default_ref_audio")
        assert told.keys() == {"name", "duration", "sample_rate", "samples", "base64"}
        assert await edge.get("/api/presets") == {"omni": [{"id": "a", "name": "A"}]}
        assert await edge.get("/api/presets/omni/a/audio") == {}
        assert (await edge.ask("GET", "/api/presets/omni/b/audio"))[0] == 404
        assert await edge.get("/api/frontend_defaults") == {
            "playback_delay_ms": 200,
            "session_s": {"video": 300.0, "audio": 600.0},
            "records": None,
        }
        assert await edge.get("/sessions") == {"total": 0, "sessions": []}
        apps = (await edge.get("/api/apps"))["apps"]
        assert {
            "app_id": "audio_duplex",
            "name": "Audio Full-Duplex",
            "route": "/audio_duplex",
        } in apps
    async with SchedulerHarness.running() as scheduler, edge_over(scheduler.address) as edge:
        voice = await edge.get("/api/default_ref_audio")
        assert (voice["name"], voice["sample_rate"]) == ("duplane.wav", 16_000)
        assert await edge.get("/api/presets") == {}


async def test_without_a_scheduler_the_edge_still_answers() -> None:
    async with SchedulerHarness.running() as scheduler:
        address = scheduler.address
    async with edge_over(address) as edge:
        assert (await edge.get("/status"))["is_scheduler_reachable"] is False
        assert (await edge.get("/health"))["status"] == "healthy"
        for path in ("/workers", "/cache", "/api/queue", "/api/queue/q", "/api/config/eta"):
            assert await edge.ask("GET", path) == (503, {"detail": "no scheduler answers"})


async def test_the_next_scheduler_answers_where_one_is_gone() -> None:
    async with SchedulerHarness.running() as scheduler:
        gone = scheduler.address
    async with SchedulerHarness.running() as scheduler, edge_over(gone, scheduler.address) as edge:
        await scheduler.worker("w1")
        assert (await edge.get("/ready"))["status"] == "ready"
        assert (await edge.get("/status"))["is_scheduler_reachable"] is True
        assert [each["worker_id"] for each in (await edge.get("/workers"))["workers"]] == ["w1"]
        assert (await edge.ask("PUT", "/api/config/eta", json={"eta_chat_s": 7}))[0] == 200
        assert (await edge.get("/api/config/eta"))["config"]["eta_chat_s"] == 7.0
