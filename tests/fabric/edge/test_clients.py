"""The limit of sessions per client, and the limit of a client's units per second."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.edge.live_edge import (
    APPEND,
    HandSetClock,
    LiveEdge,
    begin,
    closed,
    end,
    exchange,
    live_edge,
    receive,
    send,
)
from websockets.asyncio.client import connect

from duplane.edge.settings import Limits

TWO = replace(Limits(), client_session_count=2)


def connect_from(edge: LiveEdge, address: str) -> connect:
    headers = {"X-Forwarded-For": address}
    return connect(edge.url(), compression=None, proxy=None, additional_headers=headers)


async def expect_refusal(edge: LiveEdge, address: str) -> None:
    async with connect_from(edge, address) as client:
        refused = await receive(client)
        assert refused["error"]["code"] == "service_unavailable"
        await closed(client, 1013)


async def test_client_with_too_many_sessions_is_refused_until_one_ends() -> None:
    async with (
        live_edge(TWO, slot_count=4, trusted_proxies=("127.0.0.0/8",)) as edge,
        connect_from(edge, "198.51.100.1") as first,
        connect_from(edge, "198.51.100.1") as second,
        connect_from(edge, "198.51.100.2") as other,
    ):
        for client in (first, second, other):
            await begin(client)
        await expect_refusal(edge, "198.51.100.1")
        await end(first)
        await edge.until_session_count(2)
        async with connect_from(edge, "198.51.100.1") as third:
            await begin(third)
            await expect_refusal(edge, "198.51.100.1")
            await end(third)
        await end(second)
        await end(other)


@pytest.mark.parametrize("proxies", [(), ("10.0.0.0/8",)])
async def test_what_a_client_says_of_itself_does_not_make_it_another(
    proxies: tuple[str, ...],
) -> None:
    async with (
        live_edge(TWO, slot_count=2, trusted_proxies=proxies) as edge,
        connect_from(edge, "198.51.100.1") as first,
        connect_from(edge, "198.51.100.2") as second,
    ):
        await begin(first)
        await begin(second)
        await expect_refusal(edge, "198.51.100.3")
        await end(first)
        await end(second)


@pytest.mark.timing
async def test_units_above_the_rate_wait_and_the_newest_win() -> None:
    limits = replace(Limits(), units_per_s=0.4, pending_unit_count=2)
    clock = HandSetClock()
    async with live_edge(limits, clock=clock) as edge, edge.connect() as client:
        await begin(client)
        for _ in range(2):  # the units of five seconds at this rate
            await exchange(client)
        conversation = await edge.fabric.conversation()
        sent_count = conversation.received.qsize()
        for _ in range(4):
            await send(client, APPEND)
        pong = await client.ping()  # the edge answers the ping after it has read the units
        await pong
        assert conversation.received.qsize() == sent_count
        for _ in range(2):
            clock.advance(2.5)
            assert (await receive(client))["type"] == "response.listen"
        assert conversation.received.qsize() == sent_count + 2
        clock.advance(2.5)
        await exchange(client)
        await end(client)
