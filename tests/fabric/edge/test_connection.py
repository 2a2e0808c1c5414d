"""Real WebSocket clients against a live edge over a scripted fabric: faults and bounds.

`live_edge` asserts after each test that no session, task, stream or slot is left.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

import pybase64
import pytest
from support.edge.live_edge import (
    APPEND,
    AUDIO_PATH,
    UPDATE,
    LiveEdge,
    begin,
    closed,
    end,
    exchange,
    live_edge,
    receive,
    send,
)
from support.edge.raw_client import RawClient, event, upgrade
from support.edge.scripted_fabric import ScriptedFabric, listened
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake

from duplane.edge import server
from duplane.edge.session.runner import SessionRunner
from duplane.edge.settings import EdgeSettings, Limits
from duplane.edge.transport.client_protocol import ClientProtocol
from duplane.edge.transport.rate_limit import RateLimit
from duplane.fabric.process import Shutdown
from duplane.fabric.v1 import session_pb2


async def test_conversation_from_queue_done_to_closed() -> None:
    async with live_edge() as edge, edge.connect() as client:
        await begin(client)
        assert [(await exchange(client))["kv_cache_length"] for _ in range(3)] == [100, 101, 102]
        await end(client)


async def test_client_that_goes_during_the_handshake_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    become_websocket = ClientProtocol.become_websocket

    def lose(
        protocol: ClientProtocol, max_bytes: int, on_writable: Callable[[], None]
    ) -> RateLimit:
        protocol.abort()
        return become_websocket(protocol, max_bytes, on_writable)

    monkeypatch.setattr(ClientProtocol, "become_websocket", lose)
    async with live_edge() as edge:
        with pytest.raises((InvalidHandshake, OSError)):
            await edge.connect()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_client_that_leaves_the_queue_leaves_it_at_once() -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        async with edge.connect() as client:
            acquisition = await edge.fabric.acquisition()
            await send(client, UPDATE)
            client.transport.abort()
            async with asyncio.timeout(WITHIN_S):
                await acquisition.is_over.wait()


async def test_client_that_vanishes_mid_unit_frees_its_slot() -> None:
    async with live_edge() as edge:
        edge.fabric.on_unit = lambda unit: []
        async with edge.connect() as client:
            await begin(client)
            conversation = await edge.fabric.conversation()
            assert (await conversation.next_request()).WhichOneof("message") == "open"
            await send(client, APPEND)
            assert (await conversation.next_request()).WhichOneof("message") == "unit"
            client.transport.abort()
            async with asyncio.timeout(WITHIN_S):
                await edge.fabric.settled()


async def test_ping_is_answered_and_a_leave_is_seen_while_a_unit_runs() -> None:
    async with live_edge() as edge, edge.connect() as client:
        edge.fabric.on_unit = lambda unit: []
        await begin(client)
        for _ in range(10):
            await send(client, APPEND)
        async with asyncio.timeout(WITHIN_S):
            await (await client.ping())
            await end(client)


async def test_chunks_of_200_ms_and_of_10_s_become_units() -> None:
    async with live_edge() as edge, edge.connect() as client:
        await begin(client)
        fifth = {**APPEND, "audio": pybase64.b64encode(pcm(3200)).decode()}
        for _ in range(5):
            await send(client, fifth)
        assert (await receive(client))["kv_cache_length"] == 100
        await send(client, {**APPEND, "audio": pybase64.b64encode(pcm(160_000)).decode()})
        lengths = [(await receive(client))["kv_cache_length"] for _ in range(10)]
        assert lengths == list(range(101, 111))
        await end(client)


def spoken(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
    speech = session_pb2.Speech(text="x", audio=pcm(24_000))
    delta = session_pb2.Delta(sequence=unit.sequence, speech=speech)
    return [session_pb2.ConverseResponse(delta=delta)]


@pytest.mark.timing
@pytest.mark.parametrize(
    "limits",
    [
        Limits(client_s=0.3, close_s=0.3, outbox_bytes=10**9),
        Limits(outbox_bytes=500_000, close_s=0.3),
    ],
    ids=["a send takes too long", "too much waits"],
)
async def test_slow_reader_is_closed_and_no_other_session_feels_it(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="duplane")
    async with live_edge(limits, slot_count=2) as edge:
        edge.fabric.on_unit = spoken
        async with edge.connect() as slow:
            await begin(slow)
            conversation = await edge.fabric.conversation()
            async with edge.connect() as witness:
                await begin(witness)
                slow.transport.pause_reading()
                # Hundreds of answers exceed the buffers of sockets.
                for sequence in range(200):
                    conversation.say(*spoken(session_pb2.Unit(sequence=sequence)))
                async with asyncio.timeout(WITHIN_S):
                    await conversation.is_over.wait()
                await send(witness, APPEND)
                assert (await receive(witness))["type"] == "response.output_audio.delta"
                await end(witness)
            slow.transport.abort()
    assert re.search(r"dialect A\) of 127\.0\.0\.1 on worker \S+ ended", caplog.text)
    assert "too_slow" in caplog.text


async def test_worker_killed_mid_unit_ends_the_session_with_an_error() -> None:
    async with live_edge() as edge, edge.connect() as client:
        edge.fabric.on_unit = lambda unit: []
        await begin(client)
        await send(client, APPEND)
        await edge.fabric.worker_server.stop(0)
        assert await receive(client) == {"type": "session.closed", "reason": "error"}
        await closed(client, 1011)


@pytest.mark.parametrize("first", [None, UPDATE, {"type": "session.init", "payload": {}}])
async def test_grants_of_a_dead_worker_end_as_worker_connect_failed(
    first: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duplane.fabric.client.FIRST_CLAIM_BACKOFF_S", 0.01)
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        await edge.fabric.worker_server.stop(0)
        async with edge.connect() as client:
            if first:
                await send(client, first)
                await send(client, {"type": "unheard.of"})
                assert (await receive(client))["error"]["code"] == "unknown_event"
            edge.fabric.is_automatic = True
            (await edge.fabric.acquisition()).grant()
            error = (await receive(client))["error"]
            assert error["code"] == "worker_connect_failed"
            await closed(client, 1013)


async def test_session_goes_on_when_the_scheduler_is_lost() -> None:
    async with live_edge() as edge, edge.connect() as client:
        await begin(client)
        await exchange(client)
        await edge.fabric.scheduler_server.stop(0)
        await exchange(client)
        assert (await edge.get("/health"))[0] == 200
        assert (await edge.get("/ready"))[0] == 503
        code, status = await edge.get("/status")
        assert (code, status["gateway_healthy"], status["is_scheduler_reachable"]) == (
            200,
            False,
            False,
        )
        await end(client)


async def test_draining_edge_lets_sessions_end_and_takes_no_new_ones() -> None:
    async with live_edge(slot_count=2) as edge, edge.connect() as client:
        await begin(client)
        edge.fabric.is_automatic = False
        async with edge.connect() as waiting:
            await edge.fabric.acquisition()
            await edge.fabric.acquisition()
            edge.drain()
            closing = await receive(waiting)
            assert closing == {"type": "session.closed", "reason": "server_shutdown"}
            await closed(waiting, 1001)
        async with edge.connect() as late:
            assert (await receive(late))["error"]["code"] == "service_unavailable"
            await closed(late, 1013)
        assert (await edge.get("/ready"))[0] == 503
        edge.fabric.is_automatic = True
        await exchange(client)
        await end(client)


async def test_draining_edge_ends_a_running_session_after_drain_s_and_counts_it() -> None:
    drain_s = 0.5
    async with live_edge(Limits(drain_s=drain_s)) as edge, edge.connect() as client:
        await begin(client)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        edge.drain()
        assert await receive(client) == {"type": "session.closed", "reason": "server_shutdown"}
        assert clock() - began_s >= drain_s
        await closed(client, 1001)
        registry = edge.edge.metrics.registry
        assert registry.get_sample_value("duplane_sessions_cut_total", {"dialect": "A"}) == 1


async def test_second_signal_tells_running_sessions_before_it_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(server, "announce", lambda _, address: announced.set_result(address))
    shutdown = Shutdown()
    async with asyncio.timeout(WITHIN_S), ScriptedFabric.running() as fabric:
        settings = EdgeSettings(listen="127.0.0.1:0", schedulers=(fabric.scheduler,))
        serving = asyncio.ensure_future(server.serve(settings, shutdown))
        url = f"ws://{await announced}/v1/realtime?mode=audio"
        async with connect(url, proxy=None) as client:
            await begin(client)
            shutdown.drain()
            await exchange(client)
            serving.cancel()
            assert await receive(client) == {"type": "session.closed", "reason": "server_shutdown"}
            await closed(client, 1001)
        with pytest.raises(asyncio.CancelledError):
            await serving
        await fabric.settled()


async def test_session_above_the_cap_is_refused() -> None:
    limits = Limits(session_count=1)
    async with live_edge(limits, slot_count=2) as edge, edge.connect() as client:
        await begin(client)
        async with edge.connect() as late:
            assert (await receive(late))["error"]["code"] == "service_unavailable"
            await closed(late, 1013)
        await end(client)


async def test_wish_names_the_client_but_is_not_ruled_by_it() -> None:
    query = "?mode=audio&client_id=" + "c" * 1000
    async with live_edge() as edge, edge.connect(query) as client:
        request = (await edge.fabric.acquisition()).request
        assert request.client_id == "c" * 128
        assert request.session_id.startswith("sess_")
        await begin(client)
        await end(client)


async def test_many_clients_share_the_slots_in_turn() -> None:
    async def converse(edge: LiveEdge) -> None:
        async with edge.connect() as client:
            await begin(client)
            await exchange(client)
            await end(client)

    async with live_edge(slot_count=3) as edge, asyncio.TaskGroup() as tasks:
        for _ in range(12):
            tasks.create_task(converse(edge))


async def test_answers_are_counted_when_the_client_sends_faster_than_real_time() -> None:
    """The worker drops units. The edge passes on the worker's counts and adds none."""

    def every_third(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
        if unit.sequence % 3 != 2:
            return []
        (response,) = listened(unit)
        response.delta.dropped_unit_count = 2
        return [response]

    async with live_edge() as edge, edge.connect() as client:
        edge.fabric.on_unit = every_third
        await begin(client)
        for _ in range(30):
            await send(client, APPEND)
        answers = [await receive(client) for _ in range(10)]
        assert [answer["metrics"] for answer in answers] == [{"dropped_units": 2}] * 10
        await end(client)


async def test_message_that_comes_with_the_upgrade_was_received_just_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    receive_message = SessionRunner.receive

    async def noted(runner: SessionRunner, message: bytes, waited_s: float = 0.0) -> None:
        waits.append(waited_s)
        await receive_message(runner, message, waited_s)

    monkeypatch.setattr(SessionRunner, "receive", noted)
    async with live_edge() as edge:
        async with RawClient(edge.edge.address) as client:
            await client.send(upgrade(AUDIO_PATH) + event(UPDATE))
            await client.read_until(b"session.created")
        await edge.settled()
    assert waits
    assert max(waits) < WITHIN_S
