"""Chats on a live edge: a turn holds its slot only until the turn ends; bounds, close reasons."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pybase64
import pytest
from support.edge.live_edge import HandSetClock, closed, live_edge, receive, send
from support.protocols.transcripts import jpeg
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.edge.session import request_rates
from duplane.edge.settings import Limits
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2, model_pb2, session_pb2

ASK = {"messages": [{"role": "user", "content": "Hi"}]}
APPEND = {"type": "input.append", "input": ASK}
CHAT = "/v1/realtime?mode=chat"


async def until(client: ClientConnection, kind: str) -> list[dict[str, Any]]:
    events = [await receive(client)]
    while events[-1]["type"] != kind:
        events.append(await receive(client))
    return events


async def test_one_request_takes_one_slot_of_the_chat_kind_and_gives_it_back() -> None:
    async with live_edge() as edge:
        for _ in range(3):
            async with edge.connect_to("/ws/chat") as client:
                await send(client, ASK)
                events = await until(client, "done")
                assert [event["type"] for event in events] == [
                    *("prefill_done", "chunk", "chunk", "done")
                ]
                assert events[-1]["text"] == "Hello there."
                await closed(client, 1000)
            acquisition = await edge.fabric.acquisition()
            assert acquisition.request.kind == lease_pb2.SESSION_KIND_CHAT
        await edge.settled()
        assert edge.fabric.acquisitions.empty()


async def test_a_request_is_asked_for_before_a_slot_is() -> None:
    clock = HandSetClock()
    async with live_edge(clock=clock) as edge, edge.connect_to("/ws/chat") as client:
        await (await client.ping())
        assert edge.fabric.acquisitions.empty()
        clock.advance(Limits().init_s)
        assert await receive(client) == {"type": "error", "error": "no request in time"}
        await closed(client, 1000)


async def test_five_turns_on_one_connection_while_another_takes_its_own() -> None:
    async with live_edge() as edge, edge.connect_to(CHAT) as client:
        assert (await receive(client))["type"] == "session.queue_done"
        await send(client, {"type": "session.init", "payload": {}})
        assert (await receive(client))["mode"] == "turn_based"
        texts: list[str] = []
        for _ in range(5):
            await send(client, APPEND)
            texts.append((await until(client, "response.done"))[-1]["text"])
            async with edge.connect_to("/ws/chat") as other:  # between turns the only slot is free
                await send(other, ASK)
                await until(other, "done")
        assert texts == ["Hello there."] * 5
        await send(client, {"type": "session.close", "reason": "turn_done"})
        assert (await receive(client))["reason"] == "turn_done"
        await closed(client, 1000)


async def test_a_client_that_vanishes_stops_its_turn() -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        async with edge.connect_to("/ws/chat") as client:
            await send(client, ASK)
            (await edge.fabric.acquisition()).grant()
            turn = await edge.fabric.turn()
            client.transport.abort()
            async with asyncio.timeout(WITHIN_S):
                await turn.is_over.wait()


async def test_a_turn_that_runs_has_its_time_when_the_edge_drains() -> None:
    async with live_edge(Limits(drain_s=WITHIN_S)) as edge:
        edge.fabric.is_automatic = False
        async with edge.connect_to("/ws/chat") as client:
            await send(client, ASK)
            (await edge.fabric.acquisition()).grant()
            turn = await edge.fabric.turn()
            edge.drain()
            turn.say(*edge.fabric.on_turn(turn.request))
            assert (await until(client, "done"))[-1]["text"] == "Hello there."
            await closed(client, 1000)


@pytest.mark.parametrize("path", ["/ws/chat", CHAT])
async def test_histories_may_be_longer_than_units(path: str) -> None:
    limits = Limits(message_bytes=10_000, chat_message_bytes=100_000)
    async with live_edge(limits) as edge, edge.connect_to(path) as client:
        await send(client, {"type": "session.init", "payload": {}, **ASK, "x": "x" * 50_000})
        await receive(client)
        with contextlib.suppress(ConnectionClosed):
            await send(client, {**ASK, "x": "x" * 100_000})
        async with asyncio.timeout(WITHIN_S):
            await client.wait_closed()
        # In dialect D, the edge may answer the first message and close before it reads the second.
        assert client.close_code in ((1009,) if path == CHAT else (1000, 1009))


async def test_pictures_and_sounds_of_a_history_reach_the_worker() -> None:
    async with live_edge() as edge, edge.connect_to("/ws/chat") as client:
        picture = pybase64.b64encode(jpeg(2, 2)).decode()
        sound = pybase64.b64encode(bytes(4 * 4800)).decode()
        parts = [
            {"type": "image", "data": picture},
            {"type": "audio", "data": sound, "sample_rate": 48_000},
        ]
        await send(client, {"messages": [{"role": "user", "content": parts}]})
        turn = await edge.fabric.turn()
        image, audio = turn.request.messages[0].parts
        assert image.image == jpeg(2, 2)
        assert len(audio.audio) == 4 * 1600
        await until(client, "done")


async def test_an_answer_that_is_too_long_stops_its_turn_and_the_chat_goes_on() -> None:
    async with live_edge(Limits(answer_bytes=1000)) as edge, edge.connect_to(CHAT) as client:
        edge.fabric.is_automatic = False
        (await edge.fabric.acquisition()).grant()
        await send(client, {"type": "input.append", "input": {**ASK, "streaming": False}})
        turn = await edge.fabric.turn()
        turn.say(session_pb2.ChatResponse(delta=session_pb2.ChatDelta(text="x" * 1001)))
        assert (await until(client, "error"))[-1]["error"]["code"] == "inference_error"
        async with asyncio.timeout(WITHIN_S):
            await turn.is_over.wait()
        await send(client, APPEND)
        (await edge.fabric.acquisition()).grant()
        turn = await edge.fabric.turn()
        turn.say(*edge.fabric.on_turn(turn.request))
        assert (await until(client, "response.done"))[-1]["text"] == "Hello there."


async def test_a_turn_whose_slot_is_lost_keeps_its_place_in_line() -> None:
    async with live_edge() as edge, edge.connect_to("/ws/chat") as client:
        edge.fabric.is_automatic = False
        await send(client, ASK)
        first = await edge.fabric.acquisition()
        assert first.request.ticket_id == ""
        first.grant()
        (await edge.fabric.turn()).fail(Reason.LEASE_STALE)
        second = await edge.fabric.acquisition()
        assert second.request.ticket_id == f"q_{first.request.request_id}"
        assert (first.request.was_granted, second.request.was_granted) == (False, True)
        second.grant()
        turn = await edge.fabric.turn()
        turn.say(*edge.fabric.on_turn(turn.request))
        await until(client, "done")


async def test_a_chat_that_falls_idle_while_the_edge_drains_is_ended() -> None:
    async with live_edge() as edge, edge.connect_to(CHAT) as client:
        edge.fabric.is_automatic = False
        (await edge.fabric.acquisition()).grant()
        await send(client, APPEND)
        turn = await edge.fabric.turn()
        edge.drain()
        turn.say(*edge.fabric.on_turn(turn.request))
        assert (await until(client, "session.closed"))[-1]["reason"] == "server_shutdown"
        await closed(client, 1001)


def sound(seconds: float) -> dict[str, Any]:
    """Return a request with this much silence, of samples at 16 kHz."""
    data = pybase64.b64encode(bytes(4 * int(16_000 * seconds))).decode()
    return {"messages": [{"role": "user", "content": [{"type": "audio", "data": data}]}]}


async def test_sound_of_a_turn_is_resampled_for_the_model_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    resample = request_rates.resample_pcm

    def noting(pcm: bytes, from_hertz: int, to_hertz: int) -> bytes:
        threads.append(threading.current_thread())
        return resample(pcm, from_hertz, to_hertz)

    monkeypatch.setattr(request_rates, "resample_pcm", noting)
    async with live_edge() as edge, edge.connect_to("/ws/chat") as client:
        edge.fabric.model = model_pb2.Model(name="m", input_rate_hertz=48_000)
        await send(client, sound(1.0))
        await until(client, "done")
        turn = (await edge.fabric.turn()).request
        assert len(turn.messages[0].parts[0].audio) == 4 * 48_000
    assert threads
    assert threading.main_thread() not in threads


async def test_turn_whose_media_are_too_large_for_the_model_is_refused() -> None:
    """The bound holds for what the worker gets, which may be more than the client has sent."""
    limits = Limits(chat_media_bytes=4 * 16_000 * 2)
    async with live_edge(limits) as edge, edge.connect_to(CHAT) as client:
        edge.fabric.model = model_pb2.Model(name="m", input_rate_hertz=48_000)
        await send(client, {"type": "session.init", "payload": {}})
        await until(client, "session.created")
        await send(client, {"type": "input.append", "input": sound(1.0)})
        error = (await until(client, "error"))[-1]["error"]
        assert error["code"] == "invalid_payload"
        assert error["message"] == (
            "input.messages[0].content[0].data: brings the media of all messages to more than"
            " 128000 bytes at 48000 Hz, the rate of the model"
        )
        await send(client, {"type": "input.append", "input": sound(0.5)})
        await until(client, "response.done")
        assert len((await edge.fabric.turn()).request.messages[0].parts[0].audio) == 4 * 24_000
