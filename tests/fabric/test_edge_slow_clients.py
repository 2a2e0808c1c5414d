"""Clients that read slowly or never, stop in the middle, or send without end.

Each is bounded in what it makes the edge hold and in how long; its slot goes back; and a witness
beside it is answered as if it were alone. `live_edge` asserts that nothing is left afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from edge_transcripts import pcm
from live_edge import (
    APPEND,
    UPDATE,
    LiveEdge,
    begin,
    closed,
    end,
    exchange,
    live_edge,
    receive,
)
from scripted_fabric import WITHIN_S, ScriptedConversation
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.edge.settings import Limits
from duplane.edge.websocket import EdgeSocket
from duplane.fabric.v1 import session_pb2
from duplane.tools.bench.raw_clients import CONTINUATION, PING, TEXT, RawClient, event, frame

QUICK = replace(Limits(), send_s=0.2, close_s=0.2, end_s=0.2, ping_s=30.0)
AUDIO_PATH = "/v1/realtime?mode=audio"
SECOND = pcm(24_000)


def speech(sequence: int) -> session_pb2.ConverseResponse:
    told = session_pb2.Speech(text="x", audio=SECOND)
    return session_pb2.ConverseResponse(delta=session_pb2.Delta(sequence=sequence, speech=told))


async def begin_raw(edge: LiveEdge, client: RawClient) -> ScriptedConversation:
    """Begin a session of dialect A and read what comes until it is created."""
    await client.upgrade(AUDIO_PATH)
    await client.send(event(UPDATE))
    await client.read_until(b"session.created")
    return await edge.fabric.conversation()


async def ended(conversation: ScriptedConversation) -> None:
    """Wait until a session has let go of its slot."""
    async with asyncio.timeout(WITHIN_S):
        await conversation.is_over.wait()


def transports_of(edge: LiveEdge) -> list[asyncio.Transport]:
    """Return those of the sessions that run."""
    connections = edge.edge._sessions._connections  # pyright: ignore[reportPrivateUsage]
    sockets = [connection._socket for connection in connections]  # pyright: ignore[reportPrivateUsage]
    return [socket.transport for socket in sockets if isinstance(socket, EdgeSocket)]


async def drip(client: RawClient, step: int) -> None:
    """Read so little at a time; 0 reads nothing."""
    while True:
        if step and not await client.read(step):
            return
        await asyncio.sleep(0.01)


async def is_welcome(edge: LiveEdge) -> bool:
    """Tell whether there is room for another connection."""
    async with RawClient(edge.edge.address) as client:
        with contextlib.suppress(OSError):
            await client.send(b"GET /health HTTP/1.1\r\nHost: e\r\n\r\n")
        return await client.read_all() != b""


@contextlib.asynccontextmanager
async def witness_of(edge: LiveEdge) -> AsyncGenerator[ClientConnection]:
    """A session beside others: every unit of it is answered, in order, to the end."""
    async with edge.connect() as client:
        await begin(client)
        await edge.fabric.conversation()
        before = (await exchange(client))["kv_cache_length"]
        yield client
        after = [(await exchange(client))["kv_cache_length"] for _ in range(5)]
        assert after == list(range(after[0], after[0] + 5))
        assert after[0] > before
        await end(client)


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
    """One long answer, through a narrow line: there is progress all the time."""
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
            await asyncio.sleep(0.02)
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
    limits = replace(QUICK, outbox_bytes=100_000, send_s=1.0, read_share=0.5)
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
        assert limits.outbox_bytes < max(waiting_bytes) < limits.outbox_bytes + 16 * 1024
        await asyncio.wait({flooding})
        assert isinstance(flooding.exception(), OSError)


# --- clients that stop in the middle ---


async def test_client_that_stops_in_the_middle_of_a_message_is_cut_in_time() -> None:
    limits = replace(QUICK, ping_s=0.2)
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
    """In the middle of a frame no client can answer a ping."""
    limits = replace(QUICK, ping_s=0.1)
    async with live_edge(limits) as edge, RawClient(edge.edge.address) as client:
        await begin_raw(edge, client)
        unit = event(APPEND)
        for at in range(0, len(unit), 4_000):
            await client.send(unit[at : at + 4_000])
            await asyncio.sleep(0.02)
        assert b"keepalive" not in await client.read_until(b"response.listen")
        await client.send(event({"type": "session.close"}))
        await client.read_until(b"session.closed")


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (frame(TEXT)[:1] + b"\xff" + (1 << 40).to_bytes(8, "big") + bytes(4), 1009),
        (frame(0x7), 1002),
        (frame(TEXT, b"", is_last=False) + frame(CONTINUATION, b"", is_last=False) * 5000, 1009),
    ],
    ids=["far too long", "no known frame", "fragments without end"],
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


# --- clients that send without end ---


@pytest.mark.parametrize(
    ("piece", "count"),
    [(frame(PING), 200_000), (frame(TEXT, b"{}"), 20_000)],
    ids=["pings", "events that are none"],
)
async def test_flood_is_read_no_faster_than_is_fair(piece: bytes, count: int) -> None:
    """The witness is served long before half of the flood is."""
    limits = replace(Limits(), read_share=0.01, outbox_bytes=10**9)
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


# --- clients that connect ---


async def test_connections_above_the_bound_are_cut_until_one_leaves() -> None:
    limits = replace(Limits(), connection_count=3)
    async with live_edge(limits, slot_count=2) as edge, edge.connect() as client:
        await begin(client)
        async with RawClient(edge.edge.address), RawClient(edge.edge.address) as last:
            await last.send(b"GET /health ")
            async with RawClient(edge.edge.address) as late:
                assert await late.read() == b""
            await exchange(client)
            await last.send(b"HTTP/1.1\r\nHost: e\r\n\r\n")
            assert (await last.read_all()).startswith(b"HTTP/1.1 200 ")
        async with edge.connect() as another:
            await begin(another)
            await end(another)
        await end(client)


@pytest.mark.parametrize(("proxies", "is_cut"), [((), True), (("127.0.0.0/8",), False)])
async def test_connections_of_one_client_are_bounded_and_those_of_a_proxy_are_not(
    proxies: tuple[str, ...], is_cut: bool
) -> None:
    limits = replace(Limits(), client_connection_count=2)
    async with (
        live_edge(limits, trusted_proxies=proxies) as edge,
        RawClient(edge.edge.address) as first,
        RawClient(edge.edge.address) as second,
        RawClient(edge.edge.address) as third,
    ):
        for client in (first, second):
            await client.send(b"GET /health HTTP/1.1\r\nHost: e\r\n")
        with contextlib.suppress(OSError):
            await third.send(b"GET /health HTTP/1.1\r\nHost: e\r\n\r\n")
        assert (await third.read_all() == b"") is is_cut
        await first.send(b"\r\n")
        assert (await first.read_all()).startswith(b"HTTP/1.1 200 ")


async def test_hundreds_that_say_nothing_are_cut_and_a_session_goes_on() -> None:
    limits = replace(Limits(), handshake_s=0.5)
    async with live_edge(limits) as edge, witness_of(edge), contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(RawClient(edge.edge.address)) for _ in range(300)]
        assert [await client.read() for client in silent] == [b""] * 300


async def test_slots_of_hundreds_that_never_begin_go_round() -> None:
    """They wait in the queue, are granted one after the other, and lose the slot again."""
    limits = replace(Limits(), init_s=0.01, close_s=0.2)
    async with (
        live_edge(limits, slot_count=2) as edge,
        witness_of(edge),
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(100):
            client = await stack.enter_async_context(RawClient(edge.edge.address))
            await client.upgrade(AUDIO_PATH)
        async with asyncio.timeout(4 * WITHIN_S):
            for _ in range(100):
                await ended(await edge.fabric.conversation())


# --- HTTP ---


@pytest.fixture(scope="module")
def long_voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minute: more than sockets hold, told by `/api/default_ref_audio` in one go."""
    path = tmp_path_factory.mktemp("voice") / "voice.wav"
    soundfile.write(path, np.zeros(16_000 * 60, "f4"), 16_000)
    return path


@pytest.mark.parametrize(
    ("limits", "step"),
    [(QUICK, 0), (replace(Limits(), http_s=0.3), 1000)],
    ids=["reads nothing", "drips"],
)
async def test_http_client_that_does_not_read_its_answer_is_cut(
    limits: Limits, step: int, long_voice: Path
) -> None:
    limits = replace(limits, connection_count=2)
    async with (
        live_edge(limits, default_voice=long_voice) as edge,
        witness_of(edge),
        RawClient(edge.edge.address) as client,
    ):
        await client.send(b"GET /api/default_ref_audio HTTP/1.1\r\nHost: e\r\n\r\n")
        assert await client.read(1)
        reading = asyncio.ensure_future(drip(client, step))
        async with asyncio.timeout(WITHIN_S):
            while not await is_welcome(edge):
                pass
        reading.cancel()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by a file")
async def test_voice_that_many_ask_for_and_nobody_reads_is_held_once(long_voice: Path) -> None:
    def rss_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    async with (
        live_edge(QUICK, default_voice=long_voice) as edge,
        contextlib.AsyncExitStack() as stack,
    ):
        before_bytes = rss_bytes()
        for _ in range(40):  # of five megabytes
            client = await stack.enter_async_context(RawClient(edge.edge.address))
            await client.send(b"GET /api/default_ref_audio HTTP/1.1\r\nHost: e\r\n\r\n")
            assert await client.read(1)
        assert rss_bytes() - before_bytes < 100e6


async def test_refused_upgrade_does_not_keep_its_connection() -> None:
    async with live_edge(QUICK) as edge, RawClient(edge.edge.address) as client:
        await client.send(b"GET /nowhere HTTP/1.1\r\nHost: e\r\nUpgrade: websocket\r\n\r\n")
        async with asyncio.timeout(WITHIN_S):
            assert await client.read_all()


async def test_silence_of_a_peer_that_is_gone_is_bounded_by_the_kernel() -> None:
    import socket

    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        pytest.skip("this system does not have it")
    async with live_edge(replace(Limits(), ping_s=7.0)) as edge, edge.connect() as client:
        await begin(client)
        (transport,) = transports_of(edge)
        accepted = transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, option) == 7000
        await end(client)


async def test_slow_client_is_closed_with_1008_where_it_can_be_told() -> None:
    limits = replace(QUICK, outbox_bytes=300_000, send_s=5.0, close_s=5.0)
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
