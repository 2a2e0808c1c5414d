"""The stream of events for operators: one Watch for all readers, and each event once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, cast

import orjson
import pytest
from support.edge.live_edge import HandSetClock
from support.time_limits import WITHIN_S

from duplane.edge.access import Caller, CallerKind
from duplane.edge.watching import feed as feed_module
from duplane.edge.watching.feed import TooManyReadersError, WatchFeed
from duplane.edge.watching.reader import Reader
from duplane.edge.watching.unit_figures import STEP_S, LateUnit, UnitFigures
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2, lease_pb2

ANN = Caller(CallerKind.OPERATOR, credential="ann")
BOB = Caller(CallerKind.OPERATOR, credential="bob")


class ScriptedWatch:
    """A scheduler whose messages a test puts into a queue; None ends a call."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[admin_pb2.WatchResponse | None] = asyncio.Queue()
        self.call_count = 0
        self.open_count = 0

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncGenerator[ScriptedWatch]:
        self.call_count += 1
        self.open_count += 1
        try:
            yield self
        finally:
            self.open_count -= 1

    async def read(self) -> admin_pb2.WatchResponse:
        if message := await self.messages.get():
            return message
        raise FabricError(Reason.UNAVAILABLE, "the scheduler has ended the watch")

    def put(self, **event: Any) -> None:
        self.messages.put_nowait(admin_pb2.WatchResponse(**event))


class Rig:
    """A feed, its scheduler and its clock."""

    def __init__(self) -> None:
        self.clock = HandSetClock()
        self.figures = UnitFigures()
        self.scheduler = ScriptedWatch()
        fabric = cast("FabricClient", self.scheduler)  # the feed calls nothing else of it
        self.feed = WatchFeed(fabric, self.figures, lambda: {"sessions": []}, self.clock)

    def late(self, sequence: int) -> None:
        at_s = self.clock.now().wall_s
        self.figures.late(LateUnit("sess_1", "w", sequence, at_s, 1200.0, "decode", 900.0))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(feed_module, "TICK_S", 0.001)
    monkeypatch.setattr(feed_module, "_RETRY_S", 0.001)
    return Rig()


def lease(number: int) -> admin_pb2.LeaseStatus:
    claims = lease_pb2.LeaseClaims(lease_id=f"l{number}", worker_id="w")
    return admin_pb2.LeaseStatus(claims=claims)


async def read(reader: Reader, name: str) -> dict[str, Any]:
    """Read until an event with this name comes, and return its last one."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            block = await reader.read()
            assert block, "the stream has ended"
            events = [event.split(b"\n") for event in block.split(b"\n\n")[:-1]]
            named = [data for head, data in events if head == b"event: " + name.encode()]
            if named:
                return orjson.loads(named[-1].removeprefix(b"data: "))


async def test_readers_share_one_call_which_ends_with_the_last_of_them(rig: Rig) -> None:
    rig.scheduler.put(snapshot=admin_pb2.Snapshot(leases=[lease(1)]))
    async with rig.feed.reading(ANN) as first:
        while not (await read(first, "snapshot"))["is_known"]:
            pass
        async with rig.feed.reading(BOB) as second:
            assert [row["lease_id"] for row in (await read(second, "snapshot"))["leases"]] == ["l1"]
            rig.scheduler.put(lease=lease(2))
            for reader in (first, second):
                assert (await read(reader, "changes"))["leases"][0]["lease_id"] == "l2"
        assert (rig.scheduler.call_count, rig.scheduler.open_count) == (1, 1)
    assert rig.scheduler.open_count == 0
    async with rig.feed.reading(ANN) as again:
        assert (await read(again, "snapshot"))["is_known"] is False
    assert rig.scheduler.open_count == 0


async def test_each_late_unit_is_sent_once(rig: Rig) -> None:
    rig.late(1)
    rig.scheduler.put(snapshot=admin_pb2.Snapshot())
    async with rig.feed.reading(ANN) as first:
        while not (snapshot := await read(first, "snapshot"))["is_known"]:
            pass
        assert [unit["sequence"] for unit in snapshot["late_units"]] == [1]
        rig.late(2)
        async with rig.feed.reading(BOB) as second:
            snapshot = await read(second, "snapshot")
            assert [unit["sequence"] for unit in snapshot["late_units"]] == [1]
            rig.clock.advance(STEP_S)
            for reader in (first, second):
                figures = await read(reader, "figures")
                assert [unit["sequence"] for unit in figures["late_units"]] == [2]
                assert figures["sample"]["leases"] == 0
            rig.clock.advance(STEP_S)
            assert (await read(first, "figures"))["late_units"] == []


async def test_samples_are_kept_for_pages_that_open_later(rig: Rig) -> None:
    rig.scheduler.put(snapshot=admin_pb2.Snapshot(tickets=[admin_pb2.TicketStatus(ticket_id="t")]))
    async with rig.feed.reading(ANN) as reader:
        while not (await read(reader, "snapshot"))["is_known"]:
            pass
        rig.figures.answered(0.1, rig.clock.now().wall_s, is_late=False)
        rig.clock.advance(STEP_S)
        sample = (await read(reader, "figures"))["sample"]
        assert (sample["unit_count"], sample["waiting"]) == (1, 1)
        async with rig.feed.reading(BOB) as other:
            assert (await read(other, "snapshot"))["samples"] == [sample]


async def test_reader_is_told_why_nothing_changes_and_gets_a_snapshot_afterwards(rig: Rig) -> None:
    rig.scheduler.put(snapshot=admin_pb2.Snapshot(leases=[lease(1)]))
    async with rig.feed.reading(ANN) as reader:
        while not (await read(reader, "snapshot"))["is_known"]:
            pass
        rig.scheduler.messages.put_nowait(None)
        assert "ended the watch" in (await read(reader, "unavailable"))["reason"]
        async with rig.feed.reading(BOB) as other:
            events = await other.read()
            assert b'"lease_id":"l1"' in events
            assert b"event: unavailable" in events
        rig.scheduler.put(snapshot=admin_pb2.Snapshot(leases=[lease(2)]))
        assert [one["lease_id"] for one in (await read(reader, "snapshot"))["leases"]] == ["l2"]


async def test_streams_are_bounded_for_each_operator_and_in_total(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MAX_READERS", 3)
    monkeypatch.setattr(feed_module, "MAX_READERS_OF_ONE", 2)
    async with rig.feed.reading(ANN), rig.feed.reading(ANN):
        with pytest.raises(TooManyReadersError, match="of this operator"):
            await rig.feed.reading(ANN).__aenter__()
        async with rig.feed.reading(BOB):
            with pytest.raises(TooManyReadersError, match="3 pages"):
                await rig.feed.reading(BOB).__aenter__()


async def test_streams_end_with_their_credential_and_with_the_edge(rig: Rig) -> None:
    async with rig.feed.reading(ANN) as ann, rig.feed.reading(BOB) as bob:
        rig.feed.end_invalid(lambda caller: "revoked" if caller is ANN else "")
        assert await ann.read() == b""
        assert await bob.read() != b""
        await rig.feed.close()
        assert await bob.read() == b""
        async with rig.feed.reading(BOB) as late:
            assert await late.read() == b""
    assert rig.scheduler.open_count == 0
