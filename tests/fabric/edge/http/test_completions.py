"""POST /v1/chat/completions on a live edge: whole answers, streams, refusals, lost clients."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
import orjson
import pybase64
import pytest
import soundfile
from support.edge.credential_rig import KeyStore, bearer
from support.edge.live_edge import QUICK, HandSetClock, LiveEdge, live_edge
from support.edge.raw_client import RawClient
from support.edge.scripted_fabric import answered
from support.time_limits import WITHIN_S

from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.http import chat_routes, completion_routes
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import read_events, read_meta, recordings
from duplane.edge.settings import Limits
from duplane.edge.transport.client_protocol import ClientProtocol
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2, model_pb2, session_pb2

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hi"}]}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
STREAM = {"stream": True}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}


async def ask(edge: LiveEdge, body: object = ASK, query: str = "") -> tuple[int, dict[str, Any]]:
    async with edge.asked() as http:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return await http.ask("POST", f"{PATH}{query}", data=content)


async def chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yield the data of each event, as JSON if it is JSON."""
    async for line in answer.content:
        if line.strip():
            assert line.startswith(b"data: ")
            data = line.removeprefix(b"data: ").strip()
            yield "[DONE]" if data == b"[DONE]" else orjson.loads(data)


async def streamed(edge: LiveEdge, body: object) -> list[Any]:
    async with aiohttp.ClientSession() as client:
        url = f"http://{edge.edge.address}{PATH}"
        async with client.post(url, json=body) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            assert answer.headers["Cache-Control"] == "no-store"
            return [chunk async for chunk in chunks(answer)]


def request_bytes(body: object) -> bytes:
    content = orjson.dumps(body)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def speaks(request: session_pb2.ChatRequest) -> list[session_pb2.ChatResponse]:
    """Answer two words, each with a tone."""
    responses = answered(request)
    for response in responses:
        if response.HasField("delta"):
            response.delta.audio = (0.5 * np.ones(2400, "<f4")).tobytes()
    responses[-1].done.token_counts.output_audio_token_count = 50
    return responses


async def test_request_is_answered_whole_on_a_slot_of_its_own() -> None:
    async with live_edge() as edge:
        edge.fabric.model = model_pb2.Model(name="voice")
        for _ in range(2):
            code, told = await ask(edge)
            assert code == 200
            assert told.pop("id").startswith("chatcmpl-")
            assert told.pop("created") > 1_700_000_000
            usage = told.pop("usage")
            assert usage.items() >= USAGE.items()
            message = {"role": "assistant", "content": "Hello there.", "refusal": None}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
            assert told == {"object": "chat.completion", "model": "voice", "choices": [choice]}
            acquisition = await edge.fabric.acquisition()
            assert acquisition.request.kind == lease_pb2.SESSION_KIND_CHAT
            assert acquisition.request.model == "gpt-4o"
            turn = await edge.fabric.turn()
            assert not turn.request.config.generate_audio
            await edge.settled()


@pytest.mark.parametrize("form", ["wav", "pcm16"])
async def test_spoken_answer_has_its_sound_and_transcript(form: str) -> None:
    body = {**ASK, **SPOKEN, "audio": {"voice": "alloy", "format": form}}
    async with live_edge() as edge:
        edge.fabric.on_turn = speaks
        code, told = await ask(edge, body)
    assert code == 200
    message = told["choices"][0]["message"]
    assert message["content"] is None
    audio = message["audio"]
    assert (audio["transcript"], audio["expires_at"]) == ("Hello there.", told["created"])
    sound = pybase64.b64decode(audio["data"])
    if form == "wav":
        samples, rate_hertz = soundfile.read(io.BytesIO(sound), dtype="int16")
        assert rate_hertz == 24_000
    else:
        samples = np.frombuffer(sound, "<i2")
    assert samples.tolist() == [16384] * 4800
    assert told["usage"]["completion_tokens"] == 53
    assert told["usage"]["completion_tokens_details"]["audio_tokens"] == 50


@pytest.mark.parametrize("has_usage", [True, False])
async def test_stream_of_text_has_the_chunks_of_openai(has_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if has_usage else {}
    async with live_edge() as edge:
        *told, last = await streamed(edge, {**ASK, **STREAM, **options})
    assert last == "[DONE]"
    assert {chunk["object"] for chunk in told} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in told}) == 1
    if has_usage:
        usage = told.pop()
        assert usage["choices"] == []
        assert usage["usage"].items() >= USAGE.items()
    for chunk in told:
        assert ("usage" in chunk) is has_usage
        assert chunk.get("usage") is None
    choices = [chunk["choices"][0] for chunk in told]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hello"},
        {"content": " there."},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]


async def test_stream_of_speech_has_transcript_and_sound_of_each_part() -> None:
    async with live_edge() as edge:
        edge.fabric.on_turn = speaks
        *told, last = await streamed(edge, {**ASK, **STREAM, **SPOKEN})
    assert last == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in told]
    assert deltas[0] == {"role": "assistant", "refusal": None}
    assert deltas[-1] == {}
    audio = [delta["audio"] for delta in deltas[1:-1]]
    assert len({piece["id"] for piece in audio}) == 1
    assert "".join(piece.get("transcript", "") for piece in audio) == "Hello there."
    sound = b"".join(pybase64.b64decode(piece.get("data", "")) for piece in audio)
    assert np.frombuffer(sound, "<i2").tolist() == [16384] * 4800
    assert audio[-1]["expires_at"] == told[0]["created"]


async def test_stream_is_sent_while_it_is_made() -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        async with aiohttp.ClientSession() as client:
            url = f"http://{edge.edge.address}{PATH}"
            asking = asyncio.ensure_future(client.post(url, json={**ASK, **STREAM}))
            (await edge.fabric.acquisition()).grant()
            turn = await edge.fabric.turn()
            responses = edge.fabric.on_turn(turn.request)
            turn.say(*responses[:2])
            async with asyncio.timeout(WITHIN_S):
                told = chunks(await asking)
                assert (await anext(told))["choices"][0]["delta"]["role"] == "assistant"
                assert (await anext(told))["choices"][0]["delta"] == {"content": "Hello"}
                turn.say(*responses[2:])
                rest = [chunk async for chunk in told]
            assert rest[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (session_pb2.FINISH_REASON_LENGTH, "length"),
        (session_pb2.FINISH_REASON_CONTEXT_FULL, "length"),
        (session_pb2.FINISH_REASON_STOP, "stop"),
    ],
)
async def test_end_of_an_answer_has_its_reason(reason: Any, told: str) -> None:
    def answer(request: session_pb2.ChatRequest) -> list[session_pb2.ChatResponse]:
        responses = answered(request)
        responses[-1].done.reason = reason
        return responses

    async with live_edge() as edge:
        edge.fabric.on_turn = answer
        assert (await ask(edge))[1]["choices"][0]["finish_reason"] == told
        assert (await streamed(edge, {**ASK, **STREAM}))[-2]["choices"][0]["finish_reason"] == told


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        ([], "invalid_value", "message"),
        ({}, "missing_required_parameter", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({**ASK, "n": 2}, "unsupported_parameter", "n"),
        ({**ASK, "max_completion_tokens": 10**9}, "invalid_value", "max_completion_tokens"),
    ],
    ids=str,
)
@pytest.mark.parametrize("rest", [{}, STREAM], ids=["whole", "stream"])
async def test_what_cannot_be_used_is_refused_by_name(
    body: object, code: str, param: str | None, rest: dict[str, Any]
) -> None:
    async with live_edge() as edge:
        sent = {**body, **rest} if isinstance(body, dict) else body
        status, told = await ask(edge, sent)
        assert status == 400
        error = told["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        assert error["param"] == param
        assert error["message"] == told["detail"]
        assert edge.fabric.acquisitions.empty()
        assert (await ask(edge))[0] == 200


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (Reason.QUEUE_FULL, 503, "server_busy"),
        (Reason.TENANT_QUOTA, 429, "insufficient_quota"),
        (Reason.KIND_NOT_SERVED, 503, "server_busy"),
        (Reason.TICKET_CANCELLED, 503, "server_busy"),
        (Reason.MODEL_NOT_SERVED, 404, "model_not_found"),
    ],
)
async def test_without_a_slot_it_is_refused(reason: Reason, status: int, code: str) -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        for body in (ASK, {**ASK, **STREAM}):
            asking = asyncio.ensure_future(ask(edge, body))
            (await edge.fabric.acquisition()).refuse(reason)
            assert (await asking)[0] == status
            assert (await asking)[1]["error"]["code"] == code


async def test_client_that_is_refused_for_now_is_told_when_to_ask_again() -> None:
    async with live_edge(Limits(client_session_count=1), trusted_proxies=("127.0.0.1",)) as edge:
        edge.fabric.is_automatic = False
        asking = asyncio.ensure_future(ask(edge))
        acquisition = await edge.fabric.acquisition()
        url = f"http://{edge.edge.address}{PATH}"
        async with aiohttp.ClientSession() as client, client.post(url, json=ASK) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert (await answer.json())["error"]["message"] == "too many sessions of one client"
        edge.fabric.is_automatic = True
        acquisition.grant()
        assert (await asking)[0] == 200


@pytest.mark.parametrize("path", [PATH, "/api/chat"])
@pytest.mark.parametrize(
    ("limit", "told", "retry_s"),
    [
        ("session_count", "sessions at the same time", 10),
        ("waiting_count", "waiting sessions", 10),
        ("daily_minutes", "minutes of this day (UTC)", 3600),
    ],
)
async def test_exhausted_quota_is_named_and_when_it_ends(
    path: str, limit: str, told: str, retry_s: int
) -> None:
    clock = HandSetClock()
    clock.advance(86_400 - clock.now().wall_s % 86_400 - 3600)  # an hour before midnight
    async with live_edge(clock=clock) as edge, aiohttp.ClientSession() as client:
        edge.fabric.is_automatic = False
        url = f"http://{edge.edge.address}{path}"
        asking = asyncio.ensure_future(client.post(url, json=ASK))
        (await edge.fabric.acquisition()).refuse(Reason.TENANT_QUOTA, f"tenant_limits.{limit}")
        async with await asking as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, str(retry_s))
            assert (await answer.json())["detail"] == f"Quota exhausted: {told}"


async def test_request_waits_for_a_slot_no_longer_than_clients_of_openai() -> None:
    async with live_edge(Limits(openai_queue_s=0.0)) as edge:
        edge.fabric.is_automatic = False
        status, told = await ask(edge)
        assert (status, told["error"]["code"]) == (503, "server_busy")


async def test_request_above_its_bound_is_refused() -> None:
    async with live_edge(Limits(chat_message_bytes=1000)) as edge:
        status, told = await ask(edge, b"{" + b" " * 1000)
        assert (status, told["error"]["code"]) == (413, "request_too_large")


async def test_answer_above_its_bound_is_no_answer() -> None:
    async with live_edge(Limits(answer_bytes=8)) as edge:
        status, told = await ask(edge)
        assert (status, told["error"]["type"]) == (500, "server_error")
        assert (await streamed(edge, {**ASK, **STREAM}))[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("field", "status", "param"),
    [
        ("messages[0].parts[1].audio", 400, "messages[0].content[1].input_audio.data"),
        ("messages[0].parts[0].image", 400, "messages[0].content[0].image_url.url"),
        ("config.max_new_token_count", 400, "max_tokens"),
        ("", 500, None),
    ],
)
async def test_fault_that_the_worker_finds_names_the_field_of_the_client(
    field: str, status: int, param: str | None
) -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        asking = asyncio.ensure_future(ask(edge, {**ASK, "max_tokens": 5}))
        (await edge.fabric.acquisition()).grant()
        reason = Reason.INVALID_FIELD if field else Reason.ENGINE_FAILED
        (await edge.fabric.turn()).fail(reason, field)
        code, told = await asking
        assert (code, told["error"]["param"]) == (status, param)


async def test_stream_whose_worker_fails_ends_with_an_error() -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        asking = asyncio.ensure_future(streamed(edge, {**ASK, **STREAM}))
        (await edge.fabric.acquisition()).grant()
        turn = await edge.fabric.turn()
        turn.say(*edge.fabric.on_turn(turn.request)[:2])
        turn.fail(Reason.ENGINE_FAILED)
        *_, word, failed = await asking
        assert word["choices"][0]["delta"] == {"content": "Hello"}
        assert failed == {
            "error": {
                "message": "scripted",
                "type": "server_error",
                "param": None,
                "code": "server_error",
            }
        }


async def test_lost_slot_before_the_first_word_is_replaced() -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        asking = asyncio.ensure_future(streamed(edge, {**ASK, **STREAM}))
        (await edge.fabric.acquisition()).grant()
        (await edge.fabric.turn()).fail(Reason.UNAVAILABLE)
        again = await edge.fabric.acquisition()
        assert again.request.model == "gpt-4o"
        again.grant()
        turn = await edge.fabric.turn()
        turn.say(*edge.fabric.on_turn(turn.request))
        told = await asking
        roles = [each for each in told[:-1] if "role" in each["choices"][0]["delta"]]
        assert len(roles) == 1
        assert told[-1] == "[DONE]"


@pytest.mark.parametrize("stage", ["queued", "running", "streaming"])
async def test_client_that_vanishes_frees_its_slot_at_once(stage: str, tmp_path: Path) -> None:
    async with live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge:
        edge.fabric.is_automatic = False
        async with RawClient(edge.edge.address) as client:
            await client.send(request_bytes({**ASK, **STREAM}))
            acquisition = await edge.fabric.acquisition()
            over = acquisition.is_over
            if stage != "queued":
                acquisition.grant()
                turn = await edge.fabric.turn()
                over = turn.is_over
                if stage == "streaming":
                    turn.say(*edge.fabric.on_turn(turn.request)[:2])
                    await client.read_until(b"Hello")
        async with asyncio.timeout(WITHIN_S):
            await over.wait()
        await edge.settled()
    (directory,) = recordings(tmp_path)
    meta = read_meta(directory)
    assert meta
    assert meta.close_reason == "gone"


WAV_FILE = {"audio": {"format": "wav"}}


@pytest.mark.parametrize("rest", [{}, STREAM, WAV_FILE], ids=["whole", "stream", "file"])
async def test_recording_is_audible_and_names_its_dialect(
    rest: dict[str, Any], tmp_path: Path
) -> None:
    settings = RecordingSettings(tmp_path, Consent.ON_REQUEST)
    body = {**ASK, **SPOKEN, **rest}
    async with live_edge(recording=settings) as edge:
        edge.fabric.on_turn = speaks
        assert (await ask(edge))[1]["recording"] is False
        url = f"http://{edge.edge.address}{PATH}?recording=on"
        async with aiohttp.ClientSession() as client, client.post(url, json=body) as answer:
            told = await answer.read()
    (directory,) = recordings(tmp_path)
    assert directory.name.encode() in told
    meta = read_meta(directory)
    assert meta
    assert (meta.path, meta.mode, meta.dialect) == (PATH, "chat", "O")
    assert meta.close_reason == "answered"
    up, *down = read_events(directory)
    assert (up["dir"], up["frame"]) == ("up", body)
    assert len(down) == (7 if rest is STREAM else 1)
    samples, rate_hertz = soundfile.read(directory / "model.wav", dtype="int16")
    assert (rate_hertz, int(samples.max())) == (24_000, pytest.approx(16384, abs=2))
    assert np.count_nonzero(samples) == 4800


async def test_keys_are_demanded_and_their_refusal_has_the_form_of_openai(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    key = store.new()
    async with live_edge(credentials=CredentialSettings(api_keys=store.path)) as edge:
        url = f"http://{edge.edge.address}{PATH}"
        async with aiohttp.ClientSession() as client:
            async with client.post(url, json=ASK) as answer:
                assert answer.status == 401
                error = (await answer.json())["error"]
                assert (error["type"], error["code"]) == (
                    "invalid_request_error",
                    "invalid_api_key",
                )
            async with client.post(url, json=ASK, headers=bearer(key.text)) as answer:
                assert answer.status == 200
        assert (await edge.fabric.acquisition()).request.tenant_id


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", PATH, 405, "method_not_supported"),
        ("POST", "/v1/models", 405, "method_not_supported"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("POST", "/v1/realtime/calls", 404, "unknown_url"),
        ("GET", "/v1/realtime", 426, None),
    ],
)
async def test_other_requests_are_refused_in_the_form_of_openai(
    method: str, path: str, status: int, code: str | None
) -> None:
    async with live_edge() as edge, edge.asked() as http:
        refused, told = await http.ask(method, path, json={})
        assert (refused, told["error"]["code"]) == (status, code)
        assert told["error"]["message"] == told["detail"]


async def test_stream_that_is_not_read_ends_and_frees_its_slot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More waits for the client than the edge keeps, or the client reads nothing for too long."""
    caplog.set_level(logging.INFO, logger="duplane")

    def speak(request: session_pb2.ChatRequest) -> list[session_pb2.ChatResponse]:
        sound = bytes(4 * 240_000)
        delta = session_pb2.ChatDelta(text="x", audio=sound)
        return [session_pb2.ChatResponse(delta=delta)] * 40

    async with live_edge(replace(QUICK, answer_bytes=1_000_000)) as edge:
        edge.fabric.on_turn = speak
        async with RawClient(edge.edge.address) as client:
            await client.send(request_bytes({**ASK, **STREAM, **SPOKEN}))
            turn = await edge.fabric.turn()
            async with asyncio.timeout(WITHIN_S):
                await turn.is_over.wait()
            await edge.settled()
    assert "too_slow" in caplog.text


async def test_stream_has_no_time_limit_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads slowly, but without a pause, for longer than a whole answer may take."""
    http_s = 0.1
    monkeypatch.setattr(Limits, "http_s", http_s)
    minute = session_pb2.ChatDelta(text="x", audio=bytes(4 * 60 * 24_000))

    def speak(request: session_pb2.ChatRequest) -> list[session_pb2.ChatResponse]:
        return [*[session_pb2.ChatResponse(delta=minute)] * 6, answered(request)[-1]]

    async with (
        live_edge(Limits(answer_bytes=10**9)) as edge,
        RawClient(edge.edge.address, is_slow=False) as client,
    ):
        edge.fabric.on_turn = speak
        begin_s = asyncio.get_running_loop().time()
        await client.send(request_bytes({**ASK, **STREAM, **SPOKEN}))
        told = b""
        while b"[DONE]" not in told[-100:]:
            piece = await client.read(1_000_000)
            assert piece, f"was cut after {len(told)} bytes"
            told += piece
            await asyncio.sleep(0.02)
        assert asyncio.get_running_loop().time() - begin_s > 2 * http_s
        assert len(told) > 6 * 60 * 48_000 * 4 / 3


async def test_kernel_keeps_little_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it seldom says that it has room, and a client that reads slowly seems not to read."""
    protocols: list[ClientProtocol] = []
    become_stream = ClientProtocol.become_stream

    def noted(protocol: ClientProtocol) -> None:
        become_stream(protocol)
        protocols.append(protocol)

    monkeypatch.setattr(ClientProtocol, "become_stream", noted)
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        async with RawClient(edge.edge.address) as client:
            await client.send(request_bytes({**ASK, **STREAM}))
            (await edge.fabric.acquisition()).grant()
            turn = await edge.fabric.turn()
            turn.say(*edge.fabric.on_turn(turn.request)[:2])
            await client.read_until(b"Hello")
            connection: socket.socket = protocols[0].socket.get_extra_info("socket")
            unsent_bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
    assert 0 < unsent_bytes <= 256 * 1024


@pytest.mark.parametrize(
    ("path", "module"), [(PATH, completion_routes), ("/api/chat", chat_routes)], ids=["O", "D"]
)
async def test_body_is_not_kept_while_a_request_waits(
    path: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = orjson.dumps(ASK) + b" "  # a short one is decoded in no thread
    before_count = sys.getrefcount(body)

    async def read_body(*_: object) -> bytes:
        return body

    monkeypatch.setattr(module, "read_body", read_body)
    async with live_edge() as edge, aiohttp.ClientSession() as client:
        edge.fabric.is_automatic = False
        url = f"http://{edge.edge.address}{path}"
        asking = asyncio.ensure_future(client.post(url, json={}))
        acquisition = await edge.fabric.acquisition()
        assert sys.getrefcount(body) == before_count
        acquisition.refuse(Reason.QUEUE_FULL)
        async with await asking as answer:
            assert answer.status == 503
