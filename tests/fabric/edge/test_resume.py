"""A client returns to its session on another socket of the same edge."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from support.edge.live_edge import (
    UPDATE,
    HandSetClock,
    begin,
    closed,
    end,
    live_edge,
    receive,
    send,
)
from support.edge.returning_client import (
    SAMPLES,
    SPEAKERS,
    A,
    B,
    C,
    Speaker,
    Talker,
    resumes,
    speaking_edge,
    spoken,
    talking,
)
from support.time_limits import WITHIN_S
from websockets.exceptions import ConnectionClosed

from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.settings import Limits
from duplane.fabric.errors import Reason
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import lease_pb2, session_pb2


async def undisturbed(speaker: Speaker, count: int) -> Talker:
    async with speaking_edge() as edge, talking(edge, speaker) as talker:
        await talker.units(count)
        await talker.end()
        return talker


@pytest.mark.parametrize("name", SPEAKERS)
async def test_client_that_loses_its_socket_hears_each_event_once(name: str) -> None:
    speaker = SPEAKERS[name]
    count = 7
    async with speaking_edge() as edge:
        async with talking(edge, speaker) as talker:
            for number in range(count):
                await talker.unit()
                if number in (1, 4, 5):  # the answer comes while there is no socket
                    await talker.lose_socket()
                    resumed = await talker.come_back()
                    if resumed["next_sample"] == SAMPLES * number:
                        await talker.unit()  # it was lost with the socket
                    else:
                        assert resumed["next_sample"] == SAMPLES * (number + 1)
                    assert 0 <= resumed["gap_s"] < WITHIN_S
                await talker.until_unit(number)
            await talker.end()
        assert resumes(edge, "same_edge") == 3
    places = [(event["unit"], event["part"]) for event in talker.heard]
    assert places == sorted(set(places))
    assert talker.content() == (await undisturbed(speaker, count)).content()
    samples = [event["next_sample"] for event in talker.heard]
    assert samples == sorted(samples)


async def test_turn_keeps_its_id_and_its_count_over_a_return() -> None:
    async with speaking_edge() as edge, talking(edge, B) as talker:
        await talker.units(1)
        await talker.lose_socket()
        await talker.come_back()
        await talker.units(1)
        turn = {event["response_id"] for event in talker.heard}
        assert len(turn) == 1
        await talker.end()


@pytest.mark.parametrize("name", SPEAKERS)
async def test_socket_that_looks_alive_is_taken_over(name: str) -> None:
    async with live_edge(continuity="worker") as edge:
        edge.fabric.on_unit = spoken
        async with talking(edge, SPEAKERS[name]) as talker:
            await talker.units(1)
            former = talker.socket
            await talker.come_back()
            while (await receive(former))["type"] != f"{SPEAKERS[name].prefix}replaced":
                pass  # another event of the unit
            async with asyncio.timeout(WITHIN_S):
                await former.wait_closed()
            await talker.units(1)
            await talker.end()


async def test_session_that_is_parked_gives_its_slot_back_and_goes_on_in_another() -> None:
    clock = HandSetClock()
    async with speaking_edge(clock=clock) as edge:
        async with talking(edge, B) as talker:
            await talker.units(1)
            await talker.park(clock)
            async with asyncio.timeout(WITHIN_S):
                await edge.fabric.settled()
            resumed = await talker.come_back()
            assert resumed["gap_s"] == Limits().hold_s
            await talker.units(1)
            assert talker.heard[-1]["response_id"] == talker.heard[0]["response_id"]
            await talker.end()
        assert resumes(edge, "rebuilt") == 1


async def test_parked_session_does_not_go_on_with_another_model() -> None:
    clock = HandSetClock()
    async with speaking_edge(clock=clock) as edge, talking(edge, B) as talker:
        await talker.units(1)
        await talker.park(clock)
        edge.fabric.model_digest = "of another release"
        await talker.come_back()
        for _ in range(2):  # the conversations before and after the pause
            await edge.fabric.conversation()
        await edge.fabric.settled()  # the session has left the worker
        clock.advance(Limits().resume_s)
        assert (await talker.until_told("closed"))["reason"] == "backend_error"
        await closed(talker.socket, 1011)


async def test_session_of_a_client_that_stays_away_ends() -> None:
    clock = HandSetClock()
    async with live_edge(continuity="worker", clock=clock) as edge:
        edge.fabric.model_digest = "m"
        async with talking(edge, A) as talker:
            await talker.park(clock)
            clock.advance(Limits().resume_s)
            await edge.settled()
            await talker.connect()
            await talker.send(talker.request())
            assert (await talker.until_error()).startswith("resume_expired")


@pytest.mark.parametrize("name", SPEAKERS)
async def test_wrong_token_leaves_the_live_socket_alone(name: str) -> None:
    async with live_edge(continuity="worker", slot_count=2) as edge:
        edge.fabric.on_unit = spoken
        async with talking(edge, SPEAKERS[name]) as talker:
            live = talker.socket
            await talker.connect()
            await talker.send(talker.request(token=talker.token[:-8] + "wrong___"))
            assert (await talker.until_error()).startswith("resume_refused")
            await closed(talker.socket, 1008)
            talker.client = live
            await talker.units(1)
            await talker.end()
        assert resumes(edge, "refused") == 1


async def test_token_of_a_session_at_another_url_is_refused() -> None:
    async with live_edge(slot_count=2) as edge, talking(edge, A) as talker:
        live = talker.socket
        async with edge.connect_to(C.path) as other:
            talker.client = other
            await talker.send({**talker.request(), "type": "resume"})
            assert "another client or URL" in await talker.until_error()
        talker.client = live
        await talker.end()


async def test_session_that_no_edge_knows_is_lost() -> None:
    async with live_edge() as edge, edge.connect_to(A.path) as client:
        await send(client, {"type": "session.resume", "token": "sess_x.y"})
        while (event := await receive(client))["type"] != "error":
            pass
        assert event["error"]["code"] == "resume_lost"
        await closed(client, 1008)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, "token: required"),
        ({"token": 1}, "token: must be a string"),
        ({"token": "x", "unit": 1}, "part: required"),
        ({"token": "x", "unit": -1, "part": 0}, "unit: must be a whole number"),
        ({"token": "x", "from_sample": 0.5}, "from_sample: must be a whole number"),
        ({"token": "x" * 300}, "token: must be at most"),
    ],
)
async def test_invalid_return_is_told_and_the_session_goes_on(
    fields: dict[str, Any], fault: str
) -> None:
    async with live_edge() as edge, edge.connect() as client:
        await send(client, {"type": "session.resume", **fields})
        while (event := await receive(client))["type"] != "error":
            pass
        assert event["error"]["message"].startswith(fault)
        await send(client, UPDATE)
        while (await receive(client))["type"] != "session.created":
            pass
        await end(client)


async def test_token_works_again_if_the_answer_was_lost() -> None:
    async with live_edge(continuity="worker") as edge:
        edge.fabric.on_unit = spoken
        async with talking(edge, B) as talker:
            await talker.units(1)
            del talker.heard[-1]  # it was lost with the socket
            await talker.lose()
            for _ in range(2):
                await talker.connect()
                await talker.send(talker.request())
                await talker.lose()
            await talker.come_back()
            while len(talker.heard) < 2:
                await talker.read()
            assert talker.heard[-1]["replayed"]
            await talker.end()


async def test_client_that_fills_all_sessions_can_return() -> None:
    async with live_edge(replace(Limits(), session_count=1)) as edge:
        async with talking(edge, A) as talker:
            await talker.come_back()
            await talker.connect()  # a client that does not return is refused
            await talker.send(UPDATE)
            assert "too many sessions" in await talker.until_error()
            talker.client = None
        await edge.until_session_count(0)


async def test_client_that_the_scheduler_refuses_can_return() -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        async with contextlib.AsyncExitStack() as sockets:
            talker = Talker(A, sockets, edge=edge)
            await talker.connect()
            (await edge.fabric.acquisition()).grant()
            await talker.until_told("queue_done")
            conversation = await edge.fabric.conversation()
            await talker.send(A.settings)
            opened = session_pb2.Opened(prompt_token_count=7)
            conversation.say(session_pb2.ConverseResponse(opened=opened))
            talker.token = (await talker.until_told("created"))["resume"]["token"]
            await talker.connect()
            (await edge.fabric.acquisition()).refuse(Reason.QUEUE_FULL)
            await talker.send(talker.request())
            await talker.until_told("resumed")
            conversation.say(
                session_pb2.ConverseResponse(
                    closed=session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CLIENT)
                )
            )
            with contextlib.suppress(ConnectionClosed):
                while True:
                    await talker.read()


async def test_client_that_closes_its_socket_leaves() -> None:
    async with live_edge() as edge, talking(edge, A) as talker:
        await talker.socket.close()
        await edge.settled()


async def test_client_is_not_resumable_where_the_edge_does_not_allow_it() -> None:
    async with live_edge(replace(Limits(), resume_s=0)) as edge, edge.connect() as client:
        await receive(client)
        await send(client, {"type": "session.resume", "token": "x"})
        assert (await receive(client))["error"]["message"] == "type: unknown event type"
        await send(client, A.settings)
        ready = await receive(client)
        assert ready["ignored_init_fields"] == ["session.resumable"]
        assert "resume" not in ready
        await send(client, A.append)
        assert "unit" not in await receive(client)
        await end(client)


@pytest.mark.parametrize(
    ("path", "settings", "named"),
    [
        (
            "/v1/realtime?mode=chat",
            {"type": "session.init", "payload": {"resumable": True}},
            "payload.resumable",
        ),
        ("/ws/chat", {"messages": [{"role": "user", "content": "x"}], "resumable": True}, "resum"),
        ("/ws/half_duplex/hd_1", {"type": "prepare", "resumable": True}, "resumable"),
    ],
    ids=["B chat", "D", "H"],
)
async def test_chats_cannot_be_resumed(path: str, settings: dict[str, Any], named: str) -> None:
    async with live_edge() as edge, edge.connect_to(path) as client:
        await send(client, settings)
        while (event := await receive(client))["type"] != "error":
            pass
        assert named in orjson.dumps(event["error"]).decode()
        assert "only duplex sessions can be resumed" in orjson.dumps(event["error"]).decode()


async def test_draining_edge_asks_its_clients_to_go_one_after_the_other() -> None:
    limits = replace(Limits(), go_away_s=30.0, drain_s=77.0, close_s=0.2)
    async with live_edge(limits, slot_count=3) as edge, edge.connect() as other:
        await begin(other)
        async with talking(edge, A) as first, talking(edge, C) as second:
            edge.drain()
            told = [await talker.until_told("go_away") for talker in (first, second)]
            assert sorted(event["after_s"] for event in told) == [15.0, 30.0]
            assert {event["within_s"] for event in told} == {77.0}
            await first.lose()  # its client has gone to another edge
            await edge.until_session_count(2)
            await second.end()
        await end(other)  # a client that did not ask is told nothing


async def test_edge_with_little_time_to_drain_asks_its_clients_to_go_before_it_ends() -> None:
    limits = replace(Limits(), go_away_s=30.0, drain_s=20.0, close_s=0.2)
    async with live_edge(limits, slot_count=2) as edge, talking(edge, A) as running:
        await edge.fabric.acquisition()
        edge.fabric.is_automatic = False
        async with edge.connect() as waiting:
            acquisition = await edge.fabric.acquisition()
            acquisition.queued(lease_pb2.Queued(ticket_id="q_1", position=1))
            assert (await receive(waiting))["type"] == "session.queued"
            await send(waiting, A.settings)
            await (await waiting.ping())
            edge.drain()
            told = [await receive(waiting), await running.until_told("go_away")]
            assert sorted(event["after_s"] for event in told) == [5.0, 10.0]
            assert all(event["after_s"] < event["within_s"] <= 20.0 for event in told)
        await running.end()


async def test_draining_edge_lets_a_waiting_client_go() -> None:
    clock = HandSetClock()
    async with live_edge(replace(Limits(), go_away_s=10.0), clock=clock) as edge:
        edge.fabric.is_automatic = False
        async with edge.connect() as client:
            acquisition = await edge.fabric.acquisition()
            acquisition.queued(lease_pb2.Queued(ticket_id="q_1", position=1))
            assert (await receive(client))["type"] == "session.queued"
            await send(client, A.settings)
            await (await client.ping())
            edge.drain()
            event = await receive(client)
            assert (event["type"], event["after_s"]) == ("session.go_away", 10.0)
            clock.advance(event["within_s"])
            await closed(client, 1001)


async def test_longest_parked_session_ends_when_the_journals_are_too_large() -> None:
    clock = HandSetClock()
    limits = replace(Limits(), journal_total_bytes=100_000)
    async with live_edge(limits, clock=clock, continuity="worker", slot_count=2) as edge:
        edge.fabric.model_digest = "m"
        async with talking(edge, A) as parked, talking(edge, B) as running:
            await parked.units(1)
            await parked.park(clock)
            await running.units(3)  # 32 kB each
            await edge.until_session_count(1)
            assert not edge.edge.metrics.registry.get_sample_value(
                "duplane_journals_given_up_total"
            )
            await running.end()


async def test_token_leaves_no_trace(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG, logger="duplane")
    exported = InMemorySpanExporter()
    async with live_edge(
        telemetry=Telemetry("edge", SimpleSpanProcessor(exported)),
        recording=RecordingSettings(tmp_path, consent=Consent.ALWAYS),
        slot_count=2,
    ) as edge:
        async with talking(edge, B) as talker:
            await talker.units(1)
            await talker.come_back()
            await talker.send(talker.request())  # not as the first event: it is refused
            await talker.until_error()
            live = talker.socket
            await talker.connect()
            await talker.send(talker.request(token=talker.token + "x"))
            await talker.until_error()
            talker.client = live
            await talker.end()
        await edge.settled()
        metrics = generate_latest(edge.edge.metrics.registry).decode()
    secret = talker.token.partition(".")[2]
    recorded = await asyncio.to_thread(contents, tmp_path)
    assert b"session.created" in recorded
    logs = "".join(record.getMessage() for record in caplog.records)
    spans = "".join(span.to_json() for span in exported.get_finished_spans())
    for text in (recorded.decode(errors="replace"), logs, spans, metrics):
        assert text
        assert secret not in text
    assert await asyncio.to_thread(names, tmp_path) == [talker.token.partition(".")[0]]


def contents(directory: Path) -> bytes:
    """Return the contents of all files in a directory."""
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def names(directory: Path) -> list[str]:
    """Return the names of the recordings: a return makes none."""
    return [path.name for path in directory.iterdir()]
