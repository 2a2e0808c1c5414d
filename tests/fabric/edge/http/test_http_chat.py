"""POST /api/chat on a live edge: one turn for one request."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pybase64
import pytest
from google.protobuf.duration_pb2 import Duration
from support.edge.live_edge import HandSetClock, LiveEdge, live_edge
from support.edge.scripted_fabric import ScriptedFabric
from support.fabric.in_process import running_edge
from support.time_limits import WITHIN_S

from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import read_events, read_meta, recordings
from duplane.edge.settings import Limits
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2, model_pb2

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
QUEUED = lease_pb2.Queued(
    ticket_id="q_000000000001", position=1, queue_length=1, estimated_wait=Duration(seconds=15)
)


async def ask(edge: LiveEdge, body: object = ASK, query: str = "") -> tuple[int, dict[str, Any]]:
    async with edge.asked() as http:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return await http.ask("POST", f"/api/chat{query}", data=content)


async def test_a_request_is_answered_whole_on_a_slot_of_its_own() -> None:
    async with live_edge() as edge:
        for _ in range(2):
            code, told = await ask(edge)
            assert code == 200
            assert 0 <= told.pop("duration_ms") < 60_000
            assert 0 <= told.pop("queue_wait_ms") < 60_000
            sound = pybase64.b64decode(told.pop("audio_data"))
            assert sound == bytes(2 * 4 * 240)
            assert told == {
                "text": "Hello there.",
                "success": True,
                "error": None,
                "audio_sample_rate": 24_000,
                "tokens_generated": 3,
                "token_stats": {
                    "cached_tokens": 0,
                    "input_tokens": 9,
                    "generated_tokens": 3,
                    "total_tokens": 12,
                },
                "estimated_queue_wait_s": 0.0,
                "recording_session_id": None,
            }
            acquisition = await edge.fabric.acquisition()
            assert acquisition.request.kind == lease_pb2.SESSION_KIND_CHAT
            await edge.settled()


async def test_without_speech_there_is_no_audio_and_streaming_is_passed_over() -> None:
    async with live_edge() as edge:
        code, told = await ask(edge, {**ASK, "streaming": True, "tts": {"enabled": False}})
        assert (code, told["text"], told["audio_data"]) == (200, "Hello there.", None)


async def test_times_in_the_queue_and_of_the_answer_are_told() -> None:
    clock = HandSetClock()
    async with live_edge(clock=clock) as edge:
        edge.fabric.is_automatic = False
        asking = asyncio.ensure_future(ask(edge))
        acquisition = await edge.fabric.acquisition()
        acquisition.queued(QUEUED)
        acquisition.queued(lease_pb2.Queued(ticket_id=QUEUED.ticket_id, position=1, queue_length=2))
        await edge.until_session_count(1)
        clock.advance(4.0)
        acquisition.grant()
        turn = await edge.fabric.turn()
        clock.advance(2.5)
        turn.say(*edge.fabric.on_turn(turn.request))
        code, told = await asking
        assert code == 200
        assert told["queue_wait_ms"] == 4000
        assert told["estimated_queue_wait_s"] == 15.0
        assert told["duration_ms"] == pytest.approx(2500.0)


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        (b"", 400, "JSON"),
        (b"{", 400, "JSON"),
        ([], 422, "message"),
        ({}, 422, "messages"),
        ({"messages": []}, 422, "messages"),
        ({"messages": [{"role": "user"}]}, 422, "messages[0].content"),
        ({"messages": [{"role": "me", "content": "x"}]}, 422, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "data": "x"}]}]},
            422,
            "messages[0].content[0].data",
        ),
        ({**ASK, "generation": {"max_new_tokens": 10**9}}, 422, "generation.max_new_tokens"),
    ],
)
async def test_what_cannot_be_used_is_refused_by_name(body: object, code: int, named: str) -> None:
    async with live_edge() as edge:
        refused, told = await ask(edge, body)
        assert refused == code
        assert told.keys() == {"detail", "error", "success"}
        assert told["success"] is False
        assert named in told["detail"]
        assert edge.fabric.acquisitions.empty()
        assert (await ask(edge))[0] == 200


async def test_a_request_above_its_bound_is_refused() -> None:
    async with live_edge(Limits(chat_message_bytes=1000)) as edge:
        assert (await ask(edge, b"{" + b" " * 999))[0] == 400
        code, told = await ask(edge, b"{" + b" " * 1000)
        assert (code, told.keys()) == (413, {"detail"})
        async with edge.asked() as http:

            async def pieces():
                for _ in range(3):
                    yield b" " * 500

            assert (await http.ask("POST", "/api/chat", data=pieces()))[0] == 413


@pytest.mark.parametrize(
    ("reason", "told", "status"),
    [
        (Reason.QUEUE_FULL, "Queue full", 503),
        (Reason.TENANT_QUOTA, "Quota exhausted", 429),
        (Reason.KIND_NOT_SERVED, "no worker serves this mode", 503),
        (Reason.TICKET_CANCELLED, "taken out of the queue", 503),
    ],
)
async def test_without_a_slot_it_is_refused(reason: Reason, told: str, status: int) -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        asking = asyncio.ensure_future(ask(edge))
        (await edge.fabric.acquisition()).refuse(reason)
        code, body = await asking
        assert (code, body["detail"], body["success"]) == (status, told, False)


async def test_a_client_has_its_bound_of_requests() -> None:
    async with live_edge(Limits(client_session_count=1), trusted_proxies=("127.0.0.1",)) as edge:
        edge.fabric.is_automatic = False
        asking = asyncio.ensure_future(ask(edge))
        acquisition = await edge.fabric.acquisition()
        code, told = await ask(edge)
        assert (code, told["detail"]) == (503, "too many sessions of one client")
        edge.fabric.is_automatic = True
        acquisition.grant()
        assert (await asking)[0] == 200
        assert (await ask(edge))[0] == 200


async def test_an_app_that_is_off_is_403() -> None:
    async with live_edge() as edge, edge.asked() as http:
        await http.ask("PUT", "/api/admin/apps/turnbased", json={"enabled": False})
        code, told = await ask(edge)
        assert (code, told["detail"]) == (403, "Turn-based Chat is currently disabled")


@pytest.mark.parametrize(
    ("reason", "field", "code", "told"),
    [
        (Reason.INVALID_FIELD, "messages[0].parts[1]", 422, "messages[0].content[1]: scripted"),
        (Reason.ENGINE_FAILED, "", 500, "scripted"),
    ],
)
async def test_a_worker_that_fails_is_told(
    reason: Reason, field: str, code: int, told: str
) -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        asking = asyncio.ensure_future(ask(edge))
        (await edge.fabric.acquisition()).grant()
        (await edge.fabric.turn()).fail(reason, field)
        refused, body = await asking
        assert (refused, body["error"]) == (code, told)


@pytest.mark.parametrize("stage", ["queued", "running"])
async def test_a_client_that_vanishes_leaves_at_once(stage: str, tmp_path: Path) -> None:
    async with live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge:
        edge.fabric.is_automatic = False
        async with aiohttp.ClientSession() as client:
            url = f"http://{edge.edge.address}/api/chat"
            asking = asyncio.ensure_future(client.post(url, json=ASK))
            acquisition = await edge.fabric.acquisition()
            over = acquisition.is_over
            if stage == "running":
                acquisition.grant()
                over = (await edge.fabric.turn()).is_over
            asking.cancel()
            async with asyncio.timeout(WITHIN_S):
                await over.wait()
        await edge.settled()
    (directory,) = recordings(tmp_path)
    meta = read_meta(directory)
    assert meta
    assert meta.close_reason == "gone"


async def test_a_request_that_runs_has_its_time_when_the_edge_drains() -> None:
    async with live_edge(Limits(drain_s=WITHIN_S)) as edge:
        edge.fabric.is_automatic = False
        asking = asyncio.ensure_future(ask(edge))
        (await edge.fabric.acquisition()).grant()
        turn = await edge.fabric.turn()
        edge.drain()
        code, told = await ask(edge)
        assert (code, told["detail"]) == (503, "shutting down")
        turn.say(*edge.fabric.on_turn(turn.request))
        assert (await asking)[0] == 200


async def test_a_request_is_recorded_if_it_says_so(tmp_path: Path) -> None:
    settings = RecordingSettings(tmp_path, Consent.ON_REQUEST)
    async with live_edge(recording=settings) as edge:
        assert (await ask(edge))[1]["recording_session_id"] is None
        told = (await ask(edge, query="?recording=on&client_id=me"))[1]
    (directory,) = recordings(tmp_path)
    meta = read_meta(directory)
    assert meta
    assert told["recording_session_id"] == directory.name
    assert (meta.path, meta.mode, meta.dialect) == ("/api/chat", "chat", "D")
    assert (meta.close_reason, meta.identity["client_id"]) == ("answered", "me")
    assert meta.worker
    up, down = read_events(directory)
    assert (up["dir"], up["frame"]) == ("up", ASK)
    assert (down["dir"], down["frame"]["text"]) == ("down", "Hello there.")


@pytest.mark.parametrize("close_s", [2.0, 0.0], ids=["told", "cut"])
async def test_a_request_ends_with_the_edge_and_leaves_nothing(
    tmp_path: Path, close_s: float
) -> None:
    async with ScriptedFabric.running() as fabric:
        fabric.is_automatic = False
        limits, recording = Limits(close_s=close_s), RecordingSettings(tmp_path, Consent.ALWAYS)
        async with aiohttp.ClientSession() as http:
            async with running_edge(fabric.scheduler, limits=limits, recording=recording) as edge:
                asking = asyncio.ensure_future(
                    http.post(f"http://{edge.address}/api/chat", json=ASK)
                )
                (await fabric.acquisition()).grant()
                await fabric.turn()
            if close_s:
                assert (await asking).status == 503
            else:
                await asyncio.wait({asking})
                with contextlib.suppress(aiohttp.ClientError):
                    assert (await asking).status == 503
            await fabric.settled()
    (directory,) = recordings(tmp_path)
    meta = read_meta(directory)
    assert meta
    assert meta.close_reason == "shutdown"


async def test_answer_names_the_model_of_the_slot() -> None:
    async with live_edge() as edge:
        edge.fabric.model = model_pb2.Model(name="voice")
        _, told = await ask(edge, query="?model=minicpm-o-4.5-realtime")
        assert told["model"] == "voice"
        assert (await edge.fabric.acquisition()).request.model == "minicpm-o-4.5-realtime"
