"""Bad input through a real WebSocket: refused by name, and the session goes on where it can."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

import orjson
import pytest
from live_edge import (
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
from scripted_fabric import WITHIN_S
from websockets.exceptions import ConnectionClosed

from duplane.edge.settings import Limits
from duplane.fabric.v1 import lease_pb2


@pytest.mark.parametrize("frame", [b"\xff\xfe{}", b'{"type":"\xc3"}', b"{", b"NaN"])
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
    caplog.set_level(logging.INFO, "duplane.edge.server")
    async with live_edge(Limits(message_bytes=100_000)) as edge, edge.connect() as client:
        await begin(client)
        await exchange(client)
        with contextlib.suppress(ConnectionClosed):  # it may be noticed while still sending
            await send(client, {**APPEND, "x": "x" * 100_000})
        await closed(client, 1009)
    assert caplog.messages[-1].endswith("too_big")


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


@pytest.mark.parametrize("depth", [900, 1000, 100_000])
async def test_deeply_nested_json_harms_nobody(depth: int) -> None:
    async with live_edge() as edge, edge.connect() as client:
        assert (await receive(client))["type"] == "session.queue_done"
        await client.send('{"type":"session.update","session":' + "[" * depth + "]" * depth + "}")
        if depth > 1000:  # more than the parser takes: not JSON
            await closed(client, 1003)
        else:
            assert (await receive(client))["error"]["code"] == "invalid_payload"
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
    async with live_edge() as edge:
        host, _, port = edge.edge.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /v1/realtime?mode=audio&client_id=%FF HTTP/1.1\r\nHost: x\r\n"
            b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            b"X-Client-Id: \xff\r\nX-Client-Id: \xfe\r\n\r\n"
        )
        async with asyncio.timeout(WITHIN_S):
            await reader.readuntil(b"session.queue_done")
        writer.transport.abort()
