"""The edge's metrics: sessions by state and end, refusals, and units and bytes of sessions."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from support.edge.live_edge import (
    APPEND,
    UPDATE,
    begin,
    closed,
    end,
    exchange,
    live_edge,
    receive,
    send,
)
from support.monitoring.metrics import Scrape, read
from support.protocols.transcripts import pcm

from duplane.edge.settings import Limits
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import session_pb2


def sessions(seen: Scrape, state: str) -> float:
    return seen.total("duplane_sessions", role="edge", state=state)


@pytest.mark.timing
async def test_sessions_are_counted_by_state_and_by_end() -> None:
    async with live_edge() as edge:
        registry = edge.edge.metrics.registry
        async with edge.connect() as client:
            await begin(client)
            await exchange(client)
            seen = read(registry)
            assert seen.value("duplane_sessions", role="edge", dialect="A", state="running") == 1
            assert sessions(seen, "waiting") == 0
            async with edge.connect() as waiting:
                await edge.until_session_count(2)
                assert sessions(read(registry), "waiting") == 1
                await waiting.close()
            await edge.until_session_count(1)
            await end(client)
        await edge.settled()
        seen = read(registry)
    assert seen.value("duplane_units_total", role="edge", outcome="listen") == 1
    duration = "duplane_unit_duration_seconds"
    assert seen.value(f"{duration}_count", role="edge", outcome="listen") == 1
    assert 0 < seen.value(f"{duration}_sum", role="edge", outcome="listen") < 1
    ended = "duplane_sessions_ended_total"
    assert seen.value(ended, role="edge", dialect="A", reason="client") == 1
    assert seen.value(ended, role="edge", dialect="A", reason="gone") == 1
    assert seen.total(ended) == 2
    assert sessions(seen, "running") == 0


async def test_gap_between_two_deltas_of_speech_is_observed() -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        async with edge.connect() as client:
            (await edge.fabric.acquisition()).grant()
            conversation = await edge.fabric.conversation()
            await send(client, UPDATE)
            assert (await conversation.next_request()).WhichOneof("message") == "open"
            conversation.say(session_pb2.ConverseResponse(opened=session_pb2.Opened()))
            for sequence in range(2):
                await send(client, APPEND)
                assert (await conversation.next_request()).WhichOneof("message") == "unit"
                speech = session_pb2.Speech(text="x", audio=pcm(24_000))
                delta = session_pb2.Delta(sequence=sequence, speech=speech)
                conversation.say(session_pb2.ConverseResponse(delta=delta))
                while (await receive(client))["type"] != "response.output_audio.delta":
                    pass
            seen = read(edge.edge.metrics.registry)
            await client.close()
    assert seen.value("duplane_speech_gap_seconds_count") == 1


async def test_refused_sessions_are_counted() -> None:
    async with live_edge(replace(Limits(), session_count=1)) as edge, edge.connect() as client:
        await begin(client)
        async with edge.connect() as refused:
            await closed(refused, 1013)
        seen = read(edge.edge.metrics.registry)
        await end(client)
    name = "duplane_sessions_refused_total"
    assert seen.value(name, reason="service_unavailable") == 1
    assert seen.value(name, reason="mode_refused") == 0


async def test_failed_calls_are_counted_by_reason() -> None:
    async with live_edge() as edge:
        async with edge.connect() as client:
            await begin(client)
            (await edge.fabric.conversation()).fail(Reason.ENGINE_FAILED)
            await closed(client, 1011)
        await edge.settled()
        seen = read(edge.edge.metrics.registry)
    assert seen.value("duplane_stream_errors_total", reason="ENGINE_FAILED") == 1
    assert seen.total("duplane_stream_errors_total") == 1


async def test_units_that_are_dropped_before_the_conversation_opens_are_counted() -> None:
    async with live_edge(replace(Limits(), early_unit_count=2)) as edge:
        edge.fabric.is_automatic = False
        async with edge.connect() as client:
            (await edge.fabric.acquisition()).grant()
            conversation = await edge.fabric.conversation()
            assert (await receive(client))["type"] == "session.queue_done"
            await send(client, UPDATE)
            assert (await conversation.next_request()).WhichOneof("message") == "open"
            for _ in range(5):
                await send(client, APPEND)
            await send(client, {"type": "session.close", "reason": "user_stop"})
            while (await receive(client))["type"] != "session.closed":
                pass
            conversation.say(session_pb2.ConverseResponse(closed=session_pb2.Closed()))
        await edge.settled()
        seen = read(edge.edge.metrics.registry)
    assert seen.value("duplane_units_total", role="edge", outcome="dropped") == 3
    assert seen.value("duplane_units_total", role="edge", outcome="unanswered") == 0


async def test_connections_are_counted_while_they_are_open_and_when_they_are_cut() -> None:
    async with live_edge(replace(Limits(), connection_count=2)) as edge:
        registry = edge.edge.metrics.registry
        assert read(registry).value("duplane_connections") == 0
        async with edge.connect() as client:
            await begin(client)
            assert read(registry).value("duplane_connections") == 1
            async with edge.connect() as second:
                # The edge may cut this connection before its answer or during the answer.
                with contextlib.suppress(OSError):
                    await edge.get("/health")
                await second.close()
            await end(client)
        await edge.settled()
        seen = read(registry)
    assert seen.value("duplane_connections_cut_total") == 1
