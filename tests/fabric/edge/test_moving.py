"""Sessions of a live edge that move from one scripted worker to another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from support.edge.live_edge import (
    APPEND,
    CLOSE,
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
from support.edge.scripted_fabric import listened
from support.monitoring.metrics import read

from duplane.edge.settings import Limits
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import session_pb2


@pytest.fixture
async def edge() -> AsyncGenerator[LiveEdge]:
    async with live_edge(slot_count=2, continuity="worker") as edge:
        edge.fabric.model_digest = "m"
        yield edge


async def test_session_goes_on_at_another_worker_without_an_event(edge: LiveEdge) -> None:
    async with edge.connect() as client:
        await begin(client)
        first = await edge.fabric.conversation()
        before = await exchange(client)
        first.fail(Reason.UNAVAILABLE)
        after = await exchange(client)
        assert after["kv_cache_length"] == before["kv_cache_length"] + 1
        second = await edge.fabric.conversation()
        requests = [await second.next_request() for _ in range(3)]
        assert [request.WhichOneof("message") for request in requests] == [
            "open",
            "rebuild",
            "unit",
        ]
        opening, rebuild, unit = requests
        assert opening.open == (await first.next_request()).open
        assert opening.open.HasField("seed")
        assert rebuild.rebuild.model_digest == "m"
        assert rebuild.rebuild.is_last
        assert [past.sequence for past in rebuild.rebuild.units] == [0]
        assert unit.unit.sequence == 1
        await end(client)


async def test_session_goes_on_when_its_lease_was_revoked(edge: LiveEdge) -> None:
    """The worker read the claim too late: once before, and once after it had the settings."""
    edge.fabric.is_automatic = False
    revoked = session_pb2.Closed(reason=session_pb2.CLOSE_REASON_REVOKED)
    async with edge.connect() as client:
        (await edge.fabric.acquisition()).grant()
        first = await edge.fabric.conversation()
        assert (await receive(client))["type"] == "session.queue_done"
        await send(client, UPDATE)
        await first.next_request()
        edge.fabric.is_automatic = True
        first.say(session_pb2.ConverseResponse(closed=revoked))
        assert (await receive(client))["type"] == "session.created"
        assert list((await edge.fabric.acquisition()).request.avoided_worker_ids) == ["w"]
        second = await edge.fabric.conversation()
        before = await exchange(client)
        second.say(session_pb2.ConverseResponse(closed=revoked))
        after = await exchange(client)
        assert after["kv_cache_length"] == before["kv_cache_length"] + 1
        await end(client)


async def test_new_request_names_the_old_ticket_and_the_worker_to_avoid(edge: LiveEdge) -> None:
    async with edge.connect() as client:
        await begin(client)
        (await edge.fabric.conversation()).fail(Reason.UNAVAILABLE)
        first, second = [await edge.fabric.acquisition() for _ in range(2)]
        assert second.request.ticket_id == f"q_{first.request.request_id}"
        assert (first.request.was_granted, second.request.was_granted) == (False, True)
        assert second.request.request_id != first.request.request_id
        assert list(second.request.avoided_worker_ids) == ["w"]
        await exchange(client)
        await end(client)


async def test_units_that_the_lost_worker_did_not_answer_are_answered_once(edge: LiveEdge) -> None:
    async with edge.connect() as client:
        await begin(client)
        first = await edge.fabric.conversation()
        await exchange(client)
        edge.fabric.on_unit = lambda _: ()
        for _ in range(3):
            await send(client, APPEND)
        while (request := await first.next_request()).unit.sequence != 3:
            pass
        assert request.HasField("unit")
        edge.fabric.on_unit = listened
        first.say(session_pb2.ConverseResponse(closed=session_pb2.Closed()))
        lengths = [(await receive(client))["kv_cache_length"] for _ in range(3)]
        assert lengths == [101, 102, 103]
        await exchange(client)
        await end(client)


@pytest.mark.timing
async def test_client_that_leaves_while_no_slot_is_free_leaves_the_queue(edge: LiveEdge) -> None:
    async with edge.connect() as client:
        await begin(client)
        first = await edge.fabric.conversation()
        await edge.fabric.acquisition()
        await exchange(client)
        edge.fabric.is_automatic = False
        first.fail(Reason.UNAVAILABLE)
        waiting = await edge.fabric.acquisition()
        await send(client, CLOSE)
        assert await receive(client) == {"type": "session.closed", "reason": "stopped"}
        await closed(client, 1000)
        async with asyncio.timeout(5):
            await waiting.is_over.wait()


@pytest.mark.timing
async def test_session_that_finds_no_slot_in_time_fails_as_without_a_move() -> None:
    limits = replace(Limits(), failover_s=0.2)
    async with live_edge(limits, continuity="worker") as edge:
        edge.fabric.model_digest = "m"
        async with edge.connect() as client:
            await begin(client)
            first = await edge.fabric.conversation()
            await exchange(client)
            edge.fabric.is_automatic = False
            first.fail(Reason.UNAVAILABLE)
            assert await receive(client) == {"type": "session.closed", "reason": "error"}
            await closed(client, 1011)
        await edge.settled()
        registry = edge.edge.metrics.registry
        failed = read(registry).value("duplane_moves_total", cause="worker_lost", outcome="failed")
        assert failed == 1


async def test_move_is_measured(edge: LiveEdge) -> None:
    registry = edge.edge.metrics.registry
    async with edge.connect() as client:
        await begin(client)
        first = await edge.fabric.conversation()
        await exchange(client)
        assert read(registry).value("duplane_journal_bytes") > 32_000
        first.say(
            session_pb2.ConverseResponse(
                closed=session_pb2.Closed(reason=session_pb2.CLOSE_REASON_SHUTDOWN)
            )
        )
        await exchange(client)
        moved = read(registry).value("duplane_moves_total", cause="shutdown", outcome="moved")
        assert moved == 1
        assert read(registry).value("duplane_move_duration_seconds_count") == 1
        await end(client)
    assert read(registry).value("duplane_journal_bytes") == 0
    assert read(registry).value("duplane_journals_given_up_total") == 0


async def test_session_that_keeps_no_journal_ends_with_its_worker() -> None:
    async with live_edge(slot_count=2, continuity="off") as edge, edge.connect() as client:
        edge.fabric.model_digest = "m"
        await begin(client)
        first = await edge.fabric.conversation()
        await exchange(client)
        first.fail(Reason.UNAVAILABLE)
        assert await receive(client) == {"type": "session.closed", "reason": "error"}
        await closed(client, 1011)


async def test_session_that_can_no_longer_move_is_shown_until_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unmovable(reason: str) -> float:
        seen = read(edge.edge.metrics.registry)
        return seen.value("duplane_unmovable_sessions", reason=reason)

    limits = replace(Limits(), journal_bytes=50_000)
    async with (
        live_edge(limits, slot_count=2, continuity="worker") as edge,
        edge.asked() as operator,
        edge.connect() as client,
    ):
        edge.fabric.model_digest = "m"
        await begin(client)
        worker = await edge.fabric.conversation()
        await exchange(client)
        assert unmovable("session_bound") == 0
        assert (await operator.get("/status"))["edge_unmovable_session_count"] == 0
        await exchange(client)
        await exchange(client)
        assert (unmovable("session_bound"), unmovable("total_bound")) == (1, 0)
        assert (await operator.get("/status"))["edge_unmovable_session_count"] == 1
        (record,) = [one for one in caplog.records if "can no longer move" in one.message]
        assert record.levelname == "WARNING"
        assert "--journal-bytes" in record.message
        requests = [await worker.next_request() for _ in range(4)]
        assert [one.unit.cannot_move for one in requests] == [False, False, False, True]
        await end(client)
        await edge.settled()
        assert unmovable("session_bound") == 0


async def test_session_of_an_edge_that_moves_none_is_not_called_unmovable() -> None:
    async with live_edge(slot_count=2, continuity="off") as edge, edge.connect() as client:
        await begin(client)
        worker = await edge.fabric.conversation()
        await exchange(client)
        assert read(edge.edge.metrics.registry).total("duplane_unmovable_sessions") == 0
        requests = [await worker.next_request() for _ in range(2)]
        assert not requests[1].unit.cannot_move
        await end(client)
