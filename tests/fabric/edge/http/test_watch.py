"""The stream of events for operators, and drains, with a real scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from support.edge.callers import NamedCallers, as_caller
from support.edge.credential_rig import KeyStore, bearer
from support.edge.live_edge import begin, end, exchange, live_edge
from support.edge.watched_stream import WATCH_PATH, WatchedStream, watched
from support.fabric.in_process import no_task_left, running_edge
from support.scheduler.scheduler_harness import SchedulerHarness

from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.server import Edge
from duplane.edge.watching import feed


@contextlib.asynccontextmanager
async def watched_fabric() -> AsyncGenerator[tuple[SchedulerHarness, Edge, WatchedStream]]:
    """Run a scheduler and an edge, and read the stream."""
    async with SchedulerHarness.running() as scheduler:
        with no_task_left("duplane/edge/"):
            async with running_edge(scheduler.address) as edge, watched(edge.address) as stream:
                yield scheduler, edge, stream


async def test_stream_shows_the_begin_the_move_and_the_end_of_a_session() -> None:
    async with watched_fabric() as (scheduler, _, stream):
        first = await scheduler.worker("first")
        await stream.until(lambda seen: "first" in seen.state.get("workers", {}))
        granted = await (await scheduler.caller(session_id="sess_1")).granted()
        await stream.until(lambda seen: seen.state["leases"])
        [lease] = stream.state["leases"].values()
        assert (lease["session_id"], lease["worker_id"], lease["is_claimed"]) == (
            "sess_1",
            "first",
            False,
        )
        await first.claim(granted)
        await stream.until(
            lambda seen: seen.state["workers"]["first"]["slots"][0]["state"] == "occupied"
        )
        await stream.until(lambda seen: seen.state["leases"][lease["lease_id"]]["is_claimed"])

        second = await scheduler.worker("second")
        moved = await scheduler.caller(session_id="sess_1", avoided_worker_ids=["first"])
        await second.claim(await moved.granted())
        await stream.until(
            lambda seen: (
                {one["worker_id"] for one in seen.state["leases"].values()} == {"first", "second"}
            )
        )
        await first.finish(0)
        await stream.until(lambda seen: len(seen.state["leases"]) == 1)
        await second.finish(0)
        await stream.until(lambda seen: not seen.state["leases"])
        assert len([name for name, _ in stream.events if name == "snapshot"]) <= 2


async def test_stream_shows_the_queue_and_what_late_pages_missed() -> None:
    async with watched_fabric() as (scheduler, edge, stream):
        waiting = await scheduler.queue(3)
        await stream.until(lambda seen: len(seen.state.get("tickets", {})) == 3)
        async with watched(edge.address) as other:
            name, snapshot = await other.next() or ("", {})
            assert name == "snapshot"
            assert [one["position"] for one in snapshot["tickets"]] == [1, 2, 3]
            assert snapshot["is_known"] is True
        await waiting[0].vanish()
        await stream.until(
            lambda seen: [one["position"] for one in seen.state["tickets"].values()] == [1, 2]
        )
        await stream.until(lambda seen: seen.events[-1][0] == "figures")
        assert stream.events[-1][1]["sample"]["waiting"] in (2, 3)


async def test_stream_says_when_no_scheduler_answers_and_continues_when_one_does() -> None:
    async with watched_fabric() as (scheduler, _, stream):
        await scheduler.worker("w")
        await stream.until(lambda seen: "w" in seen.state.get("workers", {}))
        await scheduler.stop()
        await stream.until(lambda seen: seen.unavailable)
        assert "w" in stream.state["workers"], "the page keeps what it shows"
        await scheduler.start()
        await stream.until(lambda seen: not seen.unavailable)


async def test_worker_drains_and_serves_again_on_the_word_of_an_operator() -> None:
    async with watched_fabric() as (scheduler, edge, stream):
        await scheduler.worker("w")
        await stream.until(lambda seen: "w" in seen.state.get("workers", {}))
        url = f"http://{edge.address}/api/admin/workers"
        async with aiohttp.ClientSession() as client:
            async with client.post(f"{url}/w/drain", json={}) as answer:
                assert (answer.status, await answer.json()) == (200, {"success": True})
            await stream.until(lambda seen: seen.state["workers"]["w"]["is_draining"])
            async with client.delete(f"{url}/w/drain") as answer:
                assert answer.status == 200
            await stream.until(lambda seen: not seen.state["workers"]["w"]["is_draining"])
            async with client.post(f"{url}/unknown/drain", json={}) as answer:
                assert answer.status == 404
            async with client.post(f"{url}/w/drain", json={"is_stop": 1}) as answer:
                assert answer.status == 422
                assert "is_stop" in (await answer.json())["detail"]


async def test_number_of_streams_of_one_operator_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "MAX_READERS_OF_ONE", 2)
    monkeypatch.setattr(feed, "MAX_READERS", 3)
    async with (
        SchedulerHarness.running() as scheduler,
        running_edge(scheduler.address, authenticator=NamedCallers()) as edge,
        watched(edge.address, as_caller("operator")) as one,
        watched(edge.address, as_caller("operator")) as two,
    ):
        for stream in (one, two):
            assert (await stream.next() or ("", {}))[0] == "snapshot"
        async with watched(edge.address, as_caller("operator")) as third:
            assert third.answer.status == 429
            assert third.answer.headers["Retry-After"]
        async with watched(edge.address, as_caller("read")) as reader:
            assert reader.answer.status == 200
            async with watched(edge.address, as_caller("drain")) as other:
                assert other.answer.status == 403
            async with watched(edge.address, as_caller("operator")) as other:
                assert other.answer.status == 429


@pytest.mark.slow
async def test_stream_counts_the_sessions_of_the_edge_and_their_units() -> None:
    async with live_edge() as live, live.connect() as client:
        async with watched(live.edge.address) as stream:
            await begin(client)
            await live.fabric.conversation()
            await exchange(client)
            running = {"dialect": "A", "state": "running", "count": 1}
            await stream.until(
                lambda seen: any(
                    fields["edge"]["sessions"] == [running] and fields["sample"]["unit_count"] == 1
                    for name, fields in seen.events
                    if name == "figures"
                )
            )
        await end(client)


async def test_head_answers_without_a_stream() -> None:
    async with (
        watched_fabric() as (_, edge, _),
        aiohttp.ClientSession() as client,
        client.head(f"http://{edge.address}{WATCH_PATH}") as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        assert await answer.read() == b""


async def test_streams_end_with_the_edge() -> None:
    async with SchedulerHarness.running() as scheduler, contextlib.AsyncExitStack() as reading:
        with no_task_left("duplane/edge/"):
            async with running_edge(scheduler.address) as edge:
                stream = await reading.enter_async_context(watched(edge.address))
                await stream.next()
        await stream.until_end()


async def test_stream_ends_with_the_key_of_its_operator(tmp_path: Path) -> None:
    operators = KeyStore(tmp_path, "operators.toml", head="")
    key = operators.add('operator = "ann"\nscopes = ["read"]')
    other = operators.add('operator = "bob"\nscopes = ["read"]')
    credentials = CredentialSettings(operator_keys=operators.path)
    async with (
        SchedulerHarness.running() as scheduler,
        running_edge(scheduler.address, credentials=credentials) as edge,
        watched(edge.address, bearer(key.text)) as stream,
        watched(edge.address, bearer(other.text)) as kept,
    ):
        await stream.next()
        await kept.next()
        operators.remove(key)
        await edge.reload()
        await stream.until_end()
        await kept.until(lambda seen: len(seen.events) > 1)
