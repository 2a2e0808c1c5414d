"""Bad input through a real WebSocket: the error names the fault, and most sessions continue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

import orjson
import pytest
from support.edge.live_edge import (
    APPEND,
    AUDIO,
    UPDATE,
    begin,
    closed,
    end,
    exchange,
    live_edge,
    receive,
    send,
)
from support.edge.raw_client import RawClient, upgrade
from support.time_limits import WITHIN_S
from websockets.exceptions import ConnectionClosed

from duplane.edge.settings import Limits
from duplane.fabric.v1 import lease_pb2


@pytest.mark.parametrize("frame", [b"{", b"NaN", b'{"type":"\xc3\xa9"'])
async def test_text_that_is_no_json_closes_with_1003(frame: bytes) -> None:
    async with live_edge() as edge, edge.connect() as client:
        await begin(client)
        await client.send(frame, text=True)
        await closed(client, 1003)


async def test_binary_frame_closes_with_1003_even_if_it_holds_json() -> None:
    async with live_edge() as edge, edge.connect() as client:
        await begin(client)
        await client.send(orjson.dumps(APPEND))
        await closed(client, 1003)


async def test_fragmented_text_is_put_together() -> None:
    async with live_edge() as edge, edge.connect() as client:
        await begin(client)
        text = orjson.dumps(APPEND).decode()
        await client.send([text[:1000], text[1000:50_000], text[50_000:]])
        assert (await receive(client))["type"] == "response.listen"
        await end(client)


async def test_message_over_the_limit_closes_with_1009(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "duplane.edge.session_registry")
    async with live_edge(Limits(message_bytes=100_000)) as edge, edge.connect() as client:
        await begin(client)
        await exchange(client)
        with contextlib.suppress(ConnectionClosed):  # the edge may close during sending
            await send(client, {**APPEND, "x": "x" * 100_000})
        await closed(client, 1009)
    assert " ended after " in caplog.messages[-1]
    assert ": too_big" in caplog.messages[-1]


async def test_a_megabyte_of_instructions_is_refused_and_the_session_goes_on() -> None:
    async with live_edge() as edge, edge.connect() as client:
        assert (await receive(client))["type"] == "session.queue_done"
        long = {"type": "session.update", "session": {"instructions": "x" * 1_000_000}}
        await send(client, long)
        assert (await receive(client))["error"] == {
            "code": "invalid_payload",
            "message": "session.instructions: must be at most 32768 bytes",
            "type": "client_error",
        }
        await send(client, UPDATE)
        assert (await receive(client))["type"] == "session.created"
        await end(client)


def nested(depth: int) -> bytes:
    """Return an event whose objects and lists are nested `depth` levels deep."""
    lists = b"[" * (depth - 2) + b"]" * (depth - 2)
    return b'{"type":"session.update","session":{"instructions":"x","temperature":' + lists + b"}}"


@pytest.mark.parametrize("depth", [65, 1024, 1025, 40_000, 100_000])
async def test_json_nested_too_deeply_is_refused_and_the_session_goes_on(depth: int) -> None:
    async with live_edge() as edge, edge.connect() as client:
        assert (await receive(client))["type"] == "session.queue_done"
        await client.send(nested(depth), text=True)
        error = (await receive(client))["error"]
        assert error["code"] == "invalid_payload"
        assert "deep" in error["message"] or "values" in error["message"]
        await send(client, UPDATE)
        assert (await receive(client))["type"] == "session.created"
        await end(client)


async def test_json_nested_as_deeply_as_may_be_is_read() -> None:
    async with live_edge() as edge, edge.connect() as client:
        assert (await receive(client))["type"] == "session.queue_done"
        await client.send(nested(64), text=True)
        assert (await receive(client))["type"] == "session.created"
        await end(client)


@pytest.mark.parametrize(("count", "is_read"), [(200, True), (201, False)])
async def test_json_of_too_many_values_is_refused_and_the_session_goes_on(
    count: int, is_read: bool
) -> None:
    limits = replace(Limits(), json_value_count=200)
    async with live_edge(limits) as edge, edge.connect() as client:
        await begin(client)
        one = orjson.dumps({**APPEND, "x": [0]})
        more = count - sum(map(one.count, (b",", b"[", b"{")))
        await send(client, {**APPEND, "x": [0] * (1 + more)})
        answer = await receive(client)
        if is_read:
            assert answer["type"] == "response.listen"
        else:
            assert answer["error"]["message"] == "message: must be at most 200 values"
            await exchange(client)
        await end(client)


@pytest.mark.parametrize("query", ["?mode=half_duplex", "?mode=telepathy", "?mode=VIDEO"])
async def test_mode_that_is_not_served_is_refused_readably(query: str) -> None:
    async with live_edge() as edge, edge.connect(query) as client:
        error = (await receive(client))["error"]
        assert error["code"] == "service_unavailable"
        await closed(client, 1008)
        assert client.close_reason == error["message"]
        assert client.close_reason is not None
        assert client.close_reason.startswith("Unsupported realtime mode: ")


@pytest.mark.parametrize("query", ["", "?mode=video", "?mode="])
async def test_mode_is_video_unless_another_is_named(query: str) -> None:
    async with live_edge() as edge, edge.connect(query) as client:
        acquisition = await edge.fabric.acquisition()
        assert acquisition.request.kind == lease_pb2.SESSION_KIND_OMNI_DUPLEX
        await begin(client)
        await end(client)


async def test_logs_tell_how_a_session_ended_and_nothing_of_what_was_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="duplane")
    async with live_edge(replace(Limits(), drain_s=1.0)) as edge, edge.connect() as client:
        await begin(client)
        await exchange(client)
        await end(client)
    assert "ended after" in caplog.text
    assert "Be brief" not in caplog.text
    assert AUDIO[:32] not in caplog.text


async def test_bytes_that_are_no_text_in_the_handshake_harm_nobody() -> None:
    handshake = upgrade("/v1/realtime?mode=audio&client_id=%FF")
    ids = b"X-Client-Id: \xff\r\nX-Client-Id: \xfe\r\n\r\n"
    async with live_edge() as edge, RawClient(edge.edge.address) as client:
        await client.send(handshake.removesuffix(b"\r\n") + ids)
        async with asyncio.timeout(WITHIN_S):
            await client.read_until(b"session.queue_done")


async def test_upgrade_that_is_refused_with_bytes_that_are_no_text_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with live_edge() as edge, RawClient(edge.edge.address) as client:
        await client.send(upgrade("/v1/realtime").replace(b": Upgrade", b": Upgrade\xe9"))
        answer = await client.read_all()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"not UTF-8" in answer
    assert not caplog.records


async def test_key_of_a_websocket_that_is_not_ascii_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with live_edge() as edge, RawClient(edge.edge.address) as client:
        await client.send(upgrade("/v1/realtime").replace(b"==\r\n", b"==\xe9\r\n"))
        answer = await client.read_all()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Sec-WebSocket-Key" in answer
    assert not caplog.records
