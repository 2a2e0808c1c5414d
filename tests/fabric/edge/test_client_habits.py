"""Behaviour of existing clients that no protocol defines but that the edge must accept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from support.edge.live_edge import (
    APPEND,
    AUDIO,
    CLOSE,
    UPDATE,
    HandSetClock,
    LiveEdge,
    begin,
    closed,
    live_edge,
    receive,
    send,
)
from support.edge.scripted_fabric import ScriptedConversation
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection

from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2


@dataclass(frozen=True)
class Client:
    """The messages of a client of one dialect, and the types of the answers that it expects."""

    path: str
    settings: object
    append: object
    close: object
    ready: str
    queue_prefix: str = "session."

    async def begin(self, socket: ClientConnection) -> None:
        assert await receive(socket) == {"type": f"{self.queue_prefix}queue_done"}
        await send(socket, self.settings)
        assert (await receive(socket))["type"] == self.ready


CLIENTS = {
    "A": Client("/v1/realtime?mode=audio", UPDATE, APPEND, CLOSE, "session.created"),
    "B": Client(
        "/v1/realtime?mode=audio",
        {"type": "session.init", "payload": {"system_prompt": "Be brief."}},
        {"type": "input.append", "input": {"audio": AUDIO}},
        CLOSE,
        "session.created",
    ),
    "C": Client(
        "/ws/duplex/adx_1",
        {"type": "prepare", "system_prompt": "Be brief."},
        {"type": "audio_chunk", "audio_base64": AUDIO},
        {"type": "stop"},
        "prepared",
        queue_prefix="",
    ),
}
every_dialect = pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS.keys())


@every_dialect
async def test_client_that_closes_its_socket_right_after_it_stops(client: Client) -> None:
    async with live_edge() as edge:
        for _ in range(3):  # each session needs the only slot, which the session before it frees
            async with edge.connect_to(client.path) as socket:
                await client.begin(socket)
                await send(socket, client.append)
                await send(socket, client.close)


Cause = Callable[[LiveEdge, ScriptedConversation], None]


def fill_context(edge: LiveEdge, conversation: ScriptedConversation) -> None:
    del edge
    last_word = session_pb2.Closed(reason=session_pb2.CLOSE_REASON_CONTEXT_FULL)
    conversation.say(session_pb2.ConverseResponse(closed=last_word))


def run_out_of_time(edge: LiveEdge, conversation: ScriptedConversation) -> None:
    del conversation
    assert isinstance(edge.clock, HandSetClock)
    edge.clock.advance(600.0)


@pytest.mark.parametrize(
    ("cause", "reason"), [(fill_context, "context_full"), (run_out_of_time, "timeout")]
)
async def test_client_that_still_sends_when_its_session_is_over_may_close_by_itself(
    cause: Cause, reason: str
) -> None:
    async with live_edge(clock=HandSetClock()) as edge, edge.connect() as socket:
        await begin(socket)
        conversation = await edge.fabric.conversation()
        cause(edge, conversation)
        assert await receive(socket) == {"type": "session.closed", "reason": reason}
        async with asyncio.timeout(WITHIN_S):
            await conversation.is_over.wait()  # the slot is free before the client disconnects
        for event in (APPEND, APPEND, CLOSE):
            await send(socket, event)
            await (await socket.ping())  # the edge has read the event and has not answered it
        await socket.close()
        await closed(socket, 1000)


async def test_client_that_does_not_close_is_closed() -> None:
    limits = replace(Limits(), close_s=0.3)
    async with live_edge(limits, clock=HandSetClock()) as edge, edge.connect() as socket:
        await begin(socket)
        run_out_of_time(edge, await edge.fabric.conversation())
        assert (await receive(socket))["reason"] == "timeout"
        await closed(socket, 1000)
