"""Clients that read slowly or never, stop in the middle of a message, or send without end.

Such a client costs bounded memory and time, and loses its slot. A good client beside it (the
witness) gets the same answers as without it. `live_edge` asserts that no task is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest
from support.edge.live_edge import (
    APPEND,
    QUICK,
    LiveEdge,
    begin,
    begin_raw,
    closed,
    drip,
    end,
    ended,
    exchange,
    live_edge,
    receive,
    witness_of,
)
from support.edge.raw_client import CONTINUATION, PING, PONG, TEXT, RawClient, event, frame
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S
from websockets.exceptions import ConnectionClosed

from duplane.edge.settings import Limits
from duplane.edge.transport.websocket import WebSocket
from duplane.fabric.v1 import session_pb2

pytestmark = pytest.mark.timing

SECOND = pcm(24_000)


def speech(sequence: int) -> session_pb2.ConverseResponse:
    told = session_pb2.Speech(text="x", audio=SECOND)
    return session_pb2.ConverseResponse(delta=session_pb2.Delta(sequence=sequence, speech=told))


def transports_of(edge: LiveEdge) -> list[asyncio.Transport]:
    """Return the transports of the running sessions."""
    runners = edge.edge._sessions._runners  # pyright: ignore[reportPrivateUsage] - white box
    clients = [runner._client for runner in runners]  # pyright: ignore[reportPrivateUsage] - white box
    return [client._protocol.socket for client in clients if isinstance(client, WebSocket)]  # pyright: ignore[reportPrivateUsage] - white box


# --- clients that do not read ---


@pytest.mark.parametrize("step", [0, 1])
async def test_client_that_reads_nothing_or_next_to_it_is_cut(step: int) -> None:
    limits = replace(QUICK, outbox_bytes=10**9)
    async with (
        live_edge(limits, slot_count=2) as edge,
        witness_of(edge),
        RawClient(edge.edge.address) as slow,
    ):
        conversation = await begin_raw(edge, slow)
        reading = asyncio.ensure_future(drip(slow, step))
        for sequence in range(100):
            conversation.say(speech(sequence))
        await ended(conversation)
        reading.cancel()


async def test_client_that_reads_steadily_may_take_longer_than_the_wait_for_one_that_does_not() -> (
    None
):
    """The client reads one long answer slowly, but without a pause."""
    limits = replace(QUICK, outbox_bytes=10**9)
    minute = session_pb2.Speech(text="x", audio=pcm(60 * 24_000))
    async with live_edge(limits) as edge, RawClient(edge.edge.address, is_slow=False) as client:
        conversation = await begin_raw(edge, client)
        delta = session_pb2.Delta(sequence=0, speech=minute)
        conversation.say(session_pb2.ConverseResponse(delta=delta))
        read_bytes, begin_s = 0, asyncio.get_running_loop().time()
        while read_bytes < len(minute.audio) * 4 / 3:
            piece = await client.read(200_000)
            assert piece, f"was cut after {read_bytes} bytes"
            read_bytes += len(piece)
            await client.send(frame(PONG))
            await asyncio.sleep(0.05)
        assert asyncio.get_running_loop().time() - begin_s > 2 * limits.send_s
        await client.send(event({"type": "session.close"}))
        await client.read_until(b"session.closed")


@pytest.mark.parametrize("path", ["/ws/chat", "/v1/realtime?mode=chat"])
async def test_chat_that_does_not_read_its_answer_is_cut_and_its_turn_stopped(path: str) -> None:
    said = [{"role": "user", "content": "Go on."}]
    request: dict[str, object] = {"messages": said, "streaming": True}
    async with live_edge(QUICK, slot_count=2) as edge, witness_of(edge):
        edge.fabric.on_turn = lambda request: []
        async with RawClient(edge.edge.address) as slow:
            await slow.upgrade(path)
            if path != "/ws/chat":
                await slow.send(event({"type": "session.init", "payload": {}}))
                request = {"type": "input.append", "input": request}
            await slow.send(event(request))
            turn = await edge.fabric.turn()
            for sequence in range(100):
                delta = session_pb2.ChatDelta(sequence=sequence, text="x", audio=SECOND)
                turn.say(session_pb2.ChatResponse(delta=delta))
            async with asyncio.timeout(WITHIN_S):
                await turn.is_over.wait()


async def test_pongs_that_nobody_reads_are_bounded_and_then_cut() -> None:
    limits = replace(QUICK, client_s=1.0, read_share=0.5)
    async with (
        live_edge(limits, slot_count=2) as edge,
        witness_of(edge) as witness,
        RawClient(edge.edge.address) as slow,
    ):
        conversation = await begin_raw(edge, slow)
        transports = transports_of(edge)
        flooding = asyncio.ensure_future(slow.send(frame(PING, b"x" * 125) * 400_000))
        waiting_bytes: set[int] = set()
        async with asyncio.timeout(WITHIN_S):
            while not conversation.is_over.is_set():
                await exchange(witness)
                waiting_bytes |= {t.get_write_buffer_size() for t in transports}
        assert 0 < max(waiting_bytes) < 80 * 1024  # the event loop's buffer is full at 64 KiB
        await asyncio.wait({flooding})
        assert isinstance(flooding.exception(), OSError)


# --- clients that stop in the middle ---


async def test_client_that_stops_in_the_middle_of_a_message_is_cut_in_time() -> None:
    limits = QUICK
    async with (
        live_edge(limits, slot_count=2) as edge,
        witness_of(edge),
        RawClient(edge.edge.address) as slow,
    ):
        conversation = await begin_raw(edge, slow)
        await slow.send(event(APPEND)[:50_000])
        await ended(conversation)
        assert b"keepalive" in await slow.read_all()


async def test_message_may_take_longer_than_a_pong_as_long_as_it_comes() -> None:
    """A client that is in the middle of a frame cannot answer a ping before the frame ends."""
    limits = replace(QUICK, client_s=0.25)
    async with live_edge(limits) as edge, RawClient(edge.edge.address) as client:
        await begin_raw(edge, client)
        unit, begin_s = event(APPEND), asyncio.get_running_loop().time()
        for at in range(0, len(unit), 2_000):
            await client.send(unit[at : at + 2_000])
            await asyncio.sleep(0.03)
        assert asyncio.get_running_loop().time() - begin_s > 2 * limits.ping_s
        assert b"keepalive" not in await client.read_until(b"response.listen")
        await client.send(event({"type": "session.close"}))
        await client.read_until(b"session.closed")


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (frame(TEXT)[:1] + b"\xff" + (1 << 40).to_bytes(8, "big") + bytes(4), 1009),
        (frame(0x7), 1002),
        (frame(0x8, b"\xff\xff"), 1002),
        (
            frame(TEXT, bytes(5_000_000), is_last=False)
            + frame(CONTINUATION, bytes(5_000_000), is_last=False),
            1009,
        ),
    ],
    ids=["far too long", "no known frame", "no close code", "fragments too long together"],
)
async def test_client_that_breaks_the_protocol_and_stays_is_told_and_cut(
    broken: bytes, code: int
) -> None:
    async with (
        live_edge(QUICK, slot_count=2) as edge,
        witness_of(edge),
        RawClient(edge.edge.address) as client,
    ):
        conversation = await begin_raw(edge, client)
        await client.send(broken)
        await ended(conversation)
        assert code.to_bytes(2, "big") in await client.read_all()


async def test_client_that_sends_a_far_too_long_message_at_once_is_told() -> None:
    limits = replace(QUICK, message_bytes=100_000)
    async with live_edge(limits) as edge, RawClient(edge.edge.address, is_slow=False) as client:
        conversation = await begin_raw(edge, client)
        for _ in range(60):  # until the kernel gives the connection a large receive window
            await client.send(event(APPEND))
            await client.read_until(b"response.listen")
        (transport,) = transports_of(edge)
        transport.pause_reading()
        await client.send(frame(TEXT, bytes(1_000_000)))
        transport.resume_reading()
        assert (1009).to_bytes(2, "big") in await client.read_all()
        await ended(conversation)


# --- clients that send without end ---


async def test_message_of_endless_empty_fragments_is_cut() -> None:
    limits = replace(QUICK, message_bytes=10_000)
    endless = frame(TEXT, b"{", is_last=False) + frame(CONTINUATION, is_last=False) * 100_000
    async with live_edge(limits) as edge, RawClient(edge.edge.address) as client:
        conversation = await begin_raw(edge, client)
        with contextlib.suppress(OSError):
            await client.send(endless)
        await ended(conversation)
        await client.read_all()


@pytest.mark.parametrize(
    ("piece", "count"),
    [(frame(PING), 200_000), (frame(TEXT, b"{}"), 20_000)],
    ids=["pings", "empty events"],
)
async def test_flood_is_read_no_faster_than_is_fair(piece: bytes, count: int) -> None:
    """The witness gets its answers long before the edge has read half of the flood."""
    limits = replace(Limits(), read_share=0.05, outbox_bytes=10**9)
    answer_count = 0

    async def count_answers(client: RawClient) -> None:
        nonlocal answer_count
        while answers := await client.read():
            answer_count += answers.count(b"\x8a\0") + answers.count(b'"error":')

    async with live_edge(limits, slot_count=2) as edge:
        async with RawClient(edge.edge.address, is_slow=False) as client:
            conversation = await begin_raw(edge, client)
            counting = asyncio.ensure_future(count_answers(client))
            sending = asyncio.ensure_future(client.send(piece * count))
            async with witness_of(edge) as witness:
                while not answer_count:
                    await exchange(witness)
                for _ in range(20):
                    await exchange(witness)
            assert answer_count < count / 2
            for task in (counting, sending):
                task.cancel()
        await ended(conversation)


async def test_silence_of_a_peer_that_is_gone_is_bounded_by_the_kernel() -> None:
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        pytest.skip("this system does not have it")
    async with live_edge(replace(Limits(), client_s=3.5)) as edge, edge.connect() as client:
        await begin(client)
        (transport,) = transports_of(edge)
        accepted = transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, option) == 7000
        await end(client)


async def test_slow_client_is_closed_with_1008_where_it_can_be_told() -> None:
    limits = replace(QUICK, outbox_bytes=300_000, client_s=5.0, close_s=5.0)
    async with live_edge(limits) as edge, edge.connect() as client:
        await begin(client)
        conversation = await edge.fabric.conversation()
        client.transport.pause_reading()
        for sequence in range(100):
            conversation.say(speech(sequence))
        await ended(conversation)
        client.transport.resume_reading()
        with contextlib.suppress(ConnectionClosed):
            while True:
                await receive(client)
        await closed(client, 1008)
