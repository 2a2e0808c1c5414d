"""A client that waits at an edge that ends keeps its place in the queue at another edge."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest
from support.edge.live_edge import live_edge
from support.fabric.in_process import running_edge
from support.scheduler.scheduler_harness import SchedulerHarness
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection, connect

from duplane.edge.recording.events import without_token
from duplane.edge.settings import Limits
from duplane.fabric.errors import Reason

REALTIME = "/v1/realtime?mode=audio"
SPEAKERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a": (REALTIME, {"type": "session.update", "session": {"instructions": "x"}}, "session"),
    "b": (REALTIME, {"type": "session.init", "payload": {}}, "payload"),
    "c": ("/ws/duplex/adx_1", {"type": "prepare"}, ""),
}
AHEAD, BEHIND = 2, 3


def settings_of(name: str, **fields: object) -> dict[str, Any]:
    _, event, place = SPEAKERS[name]
    return {**event, place: {**event[place], **fields}} if place else {**event, **fields}


@contextlib.asynccontextmanager
async def at(address: str, name: str, **fields: object) -> AsyncGenerator[ClientConnection]:
    url = f"ws://{address}{SPEAKERS[name][0]}"
    async with connect(url, compression=None, proxy=None) as client:
        await client.send(orjson.dumps(settings_of(name, **fields)), text=True)
        yield client


async def place(client: ClientConnection, position: int) -> dict[str, Any]:
    """Wait for a place in the queue; assert that no place is worse than the one before."""
    lowest = 1000
    async with asyncio.timeout(WITHIN_S):
        while True:
            event = orjson.loads(await client.recv())
            assert event["position"] <= lowest
            lowest = event["position"]
            if lowest == position:
                return event


@pytest.mark.parametrize("name", SPEAKERS)
async def test_client_of_an_edge_that_ends_keeps_its_position_at_another(name: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        harness = await enter(SchedulerHarness.running(queued_interval_s=0.1))
        second = await enter(running_edge(harness.address))
        for position in range(1, AHEAD + 1):
            await (await harness.caller()).stands(position)
        async with running_edge(harness.address) as first:
            client = await enter(at(first.address, name, resumable=True))
            event = await place(client, AHEAD + 1)
            while "queue_token" not in event:  # the first one may come before the settings
                event = await place(client, AHEAD + 1)
            for index in range(BEHIND):
                await (await harness.caller()).stands(AHEAD + 2 + index)
        token = event["queue_token"]
        back = await enter(at(second.address, name, resumable=True, queue_token=token))
        assert (await place(back, AHEAD + 1))["queue_length"] == AHEAD + 1 + BEHIND


@pytest.mark.parametrize("name", SPEAKERS)
async def test_client_that_cannot_return_gets_no_token(name: str) -> None:
    async with SchedulerHarness.running(queued_interval_s=0.05) as harness:
        limits = Limits(resume_s=0)
        async with running_edge(harness.address) as edge, at(edge.address, name) as client:
            for _ in range(4):
                assert "queue_token" not in await place(client, 1)
        async with (
            running_edge(harness.address, limits=limits) as edge,
            at(edge.address, name, resumable=True) as client,
        ):
            for _ in range(4):
                assert "queue_token" not in await place(client, 1)


@pytest.mark.parametrize("name", SPEAKERS)
async def test_token_that_is_refused_is_named(name: str) -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        address = edge.edge.address
        async with at(address, name, resumable=True, queue_token="t" * 513) as client:
            await edge.fabric.acquisition()
            assert "queue_token" in str(await client.recv())
        async with at(address, name, resumable=True, queue_token="sealed") as client:
            acquisition = await edge.fabric.acquisition()
            if not acquisition.request.queue_token:  # the settings came later
                await asyncio.wait_for(acquisition.is_over.wait(), WITHIN_S)
                acquisition = await edge.fabric.acquisition()
            assert acquisition.request.queue_token == "sealed"
            acquisition.refuse(Reason.INVALID_FIELD, "queue_token")
            await client.wait_closed()
            assert client.close_code == 1008


async def test_slot_that_comes_before_the_settings_is_kept() -> None:
    async with live_edge() as edge, edge.connect() as client:
        assert orjson.loads(await client.recv())["type"] == "session.queue_done"
        settings = settings_of("b", resumable=True, queue_token="sealed")
        await client.send(orjson.dumps(settings), text=True)
        assert orjson.loads(await client.recv())["type"] == "session.created"
        assert edge.fabric.acquisitions.qsize() == 1


def test_tokens_are_not_recorded() -> None:
    event = orjson.dumps(settings_of("b", queue_token="secret", voice="v" * 100_000))
    assert b"secret" not in without_token(event)
    assert without_token(event).endswith(b"v" * 10 + b'"}}')
