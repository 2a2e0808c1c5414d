"""Sessions whose copy a real worker keeps, so that another edge can continue them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import grpc.aio
import pytest
from support.time_limits import WITHIN_S
from support.worker.kept_sessions import (
    LONG_S,
    OCCUPIED,
    SETTINGS,
    attach,
    attached,
    keep,
    kept,
    left_copy,
    read_copy,
    refused,
    refused_take_over,
    say,
    taken_over,
    taking_over,
)
from support.worker.rebuild_messages import context, past, rebuild, rebuilt
from support.worker.worker_harness import Client, Rig, running_worker, unit

from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.token_secrets import digest_of
from duplane.fabric.v1 import registry_pb2, session_pb2
from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.session import kept_calls
from duplane.worker.session.copy_pace import CopyPace
from duplane.worker.session.servicer import SessionServicer


@pytest.fixture(autouse=True)
def quick_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send past units at once."""
    monkeypatch.setattr(CopyPace, "quiet_s", 0.0)


async def test_another_edge_continues_a_session_in_the_same_slot() -> None:
    async with running_worker() as rig, kept(rig, keep(edge_note=b"note")) as first:
        deltas = [await say(first, 0), await say(first, 1, edge_note=b"note 1")]
        first.vanish()
        async with attached(rig, after_sequence=0) as second:
            copy, kept_deltas, units = await read_copy(second)
            assert copy.open == SETTINGS
            assert copy.opened.accepts_keep
            assert copy.granted.ticket_id == "q_1"
            assert copy.edge_note == b"note 1"
            assert (copy.last_sequence, copy.received_sequence) == (1, 1)
            assert (copy.attach_number, copy.first_sequence) == (1, 0)
            assert kept_deltas == deltas
            assert [past.token_ids for past in units] == [one.token_ids for one in deltas]
            assert rig.scheduler.report.slots[0].state == OCCUPIED
            assert (await say(second, 2)).context_token_count == context(3)
            assert (await second.end()).unit_count == 3


async def test_the_latest_note_is_kept() -> None:
    async with running_worker() as rig, kept(rig, keep(edge_note=b"first")) as client:
        await say(client, 0)
        async with attached(rig) as edge:
            assert (await read_copy(edge))[0].edge_note == b"first"
            await say(edge, 1, edge_note=b"second")
            await say(edge, 2)
            async with attached(rig) as last:
                copy, *_ = await read_copy(last)
                assert copy.edge_note == b"second"
                assert not copy.HasField("detached_duration")
                await last.end()


@pytest.mark.parametrize(
    ("after", "noted", "sent"), [(3, 4, [3, 4]), (3, 2, [2, 3, 4]), (3, None, [0, 1, 2, 3, 4])]
)
async def test_only_those_deltas_are_sent_that_the_next_edge_needs(
    after: int, noted: int | None, sent: list[int]
) -> None:
    async with running_worker() as rig, kept(rig) as first:
        for sequence in range(5):
            await say(first, sequence, edge_note=b"note", edge_note_sequence=noted)
        async with attached(rig, after_sequence=after) as second:
            copy, deltas, units = await read_copy(second)
            assert [one.sequence for one in deltas] == sent
            assert (copy.first_sequence, len(units)) == (sent[0], 5)
            await second.end()


async def test_units_are_answered_while_the_past_units_are_sent() -> None:
    count = 200  # of 32 KB; one message has at most 128 KB
    async with running_worker() as rig, kept(rig, keep(hold_s=0.0)) as first:
        for sequence in range(count):
            await say(first, sequence, edge_note=b"note", edge_note_sequence=sequence)
        async with attached(rig, after_sequence=count - 1) as second:
            await second.send(unit(count, 0.5))
            await rig.received(count + 1)
            messages = [await second.read()]
            while not messages[-1].kept.is_last:
                messages.append(await second.read())
            names = [one.WhichOneof("message") for one in messages]
            assert 0 < names.index("delta", 2) < len(names) - 1
            past = [one.sequence for message in messages for one in message.kept.units]
            assert past == list(range(count))
            async with attached(rig) as third:  # has the unit that was answered meanwhile
                assert len((await read_copy(third))[2]) == count + 1
                await third.end()


async def test_past_units_come_after_the_last_return(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_worker() as rig, kept(rig) as first:
        await say(first, 0)
        monkeypatch.setattr(CopyPace, "quiet_s", LONG_S)
        async with attached(rig) as second:
            assert (await second.read()).HasField("attached")
            await second.delta()  # the one that the client lacks
            await say(second, 1)
            monkeypatch.setattr(CopyPace, "quiet_s", 0.0)
            async with attached(rig) as third:
                assert len((await read_copy(third))[2]) == 2
                await third.end()


async def test_two_edges_get_the_same_past_units_while_units_go_on() -> None:
    async with running_worker() as rig, kept(rig) as first:
        for sequence in range(100):
            await say(first, sequence)
        async with attached(rig) as second:
            assert (await second.read()).HasField("attached")  # reads no past units yet
            async with attached(rig) as third:
                assert len((await read_copy(third))[2]) == 100
                await say(third, 100)
                await third.end()
        await rig.all_free()


async def test_the_edge_that_attaches_last_has_the_session() -> None:
    async with running_worker() as rig, kept(rig) as first:
        await say(first, 0)
        async with attached(rig) as second:
            await read_copy(second)
            assert (await first.refused()).reason is Reason.SUPERSEDED
            async with attached(rig) as third:
                assert (await read_copy(third))[0].attach_number == 2
                assert (await second.refused()).reason is Reason.SUPERSEDED
                await say(third, 1)
                await third.end()
        await rig.all_free()
        assert (await refused(rig)).reason is Reason.UNKNOWN_SESSION


async def test_lease_that_its_holder_gives_back_does_not_end_the_session_of_another_edge() -> None:
    async with running_worker() as rig:
        granted = rig.grant(session_id="s")
        revoke = registry_pb2.Revoke(fencing_number=rig.last_number(0), lease_id=granted.lease_id)
        async with rig.opened(granted, SETTINGS) as first:
            await first.write(session_pb2.ConverseRequest(keep=keep()))
            await say(first, 0)
            async with attached(rig) as second:
                await read_copy(second)
                await rig.scheduler.tell(revoke=revoke)
                await rig.scheduler.tell(drain=registry_pb2.Drain())
                await second.leaving()  # the worker has both messages, in this order
                assert (await say(second, 1)).context_token_count == context(2)
                revoke.is_end = True
                await rig.scheduler.tell(revoke=revoke)
                assert (await second.closed()).reason == session_pb2.CLOSE_REASON_OPERATOR


async def test_units_that_run_meanwhile_are_answered_to_the_next_edge() -> None:
    async with running_worker() as rig, kept(rig) as first:
        await say(first, 0)
        rig.model.hold()
        await first.send(unit(1, 0.5))
        await rig.model.held()
        await first.send(unit(2, 0.5))
        await rig.received(3)
        async with attached(rig) as second:
            assert (await first.refused()).reason is Reason.SUPERSEDED
            rig.model.let_go()
            copy, deltas, units = await read_copy(second)
            assert (copy.last_sequence, copy.received_sequence) == (2, 2)
            assert [one.sequence for one in deltas] == [one.sequence for one in units] == [0, 1, 2]
            await second.end()


async def test_unit_that_is_lost_while_it_is_prepared_can_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare, is_prepared = DeviceThread.prepare_unit, asyncio.Event()

    async def stay(
        engine: DeviceThread, channel: SlotChannel, record: UnitRecord
    ) -> UnitRecord | FailedUnit:
        if record.unit.sequence == 1 and not is_prepared.is_set():
            is_prepared.set()
            await asyncio.Event().wait()  # as pictures may
        return await prepare(engine, channel, record)

    monkeypatch.setattr(DeviceThread, "prepare_unit", stay)
    async with running_worker() as rig, kept(rig) as first:
        await say(first, 0)
        await first.send(unit(1, 0.5))
        async with asyncio.timeout(WITHIN_S):
            await is_prepared.wait()
        async with attached(rig) as second:
            assert (await read_copy(second))[0].received_sequence == 0
            assert (await say(second, 1)).context_token_count == context(2)
            await second.end()


async def test_session_that_is_rebuilt_at_its_former_worker_has_one_copy() -> None:
    async with running_worker() as rig:
        await left_copy(rig)
        async with kept(rig) as client:
            await client.write(rebuild(past(0)))
            await rebuilt(client)
            async with attached(rig) as edge:
                assert (await read_copy(edge))[0].last_sequence == 0
                await edge.end()
        assert (await refused_take_over(rig)).reason is Reason.UNKNOWN_SESSION


async def test_one_of_many_edges_that_attach_at_once_goes_on() -> None:
    async with running_worker() as rig, kept(rig) as first, contextlib.AsyncExitStack() as stack:
        await say(first, 0)
        winner = first
        for turn in range(20):
            edges = [await stack.enter_async_context(rig.call()) for _ in range(5)]
            request = session_pb2.ConverseRequest(attach=attach())
            await asyncio.gather(*(edge.write(request) for edge in edges))
            numbers = await asyncio.gather(*(attach_number(edge) for edge in edges))
            last = max(numbers)
            assert last == 5 * (turn + 1)
            for edge, number in zip(edges, numbers, strict=True):
                if number != last:
                    assert await until_refused(edge) is Reason.SUPERSEDED
            winner = edges[numbers.index(last)]
        assert (await say(winner, 1)).context_token_count == context(2)
        await winner.end()


async def attach_number(edge: Client) -> int:
    """Return the number that an edge got; 0 if another edge was later."""
    try:
        return (await read_copy(edge))[0].attach_number
    except FabricError:
        return 0


async def until_refused(edge: Client) -> Reason:
    while True:
        try:
            await edge.read()
        except FabricError as error:
            return error.reason


async def test_slot_is_free_after_the_hold_and_the_copy_goes_to_the_next_edge() -> None:
    async with running_worker() as rig, kept(rig, keep(hold_s=0.05)) as first:
        deltas = [await say(first, 0), await say(first, 1)]
        first.vanish()
        await rig.all_free()
        assert (await refused(rig)).reason is Reason.UNKNOWN_SESSION
        responses = await taken_over(rig, after_sequence=0)
        assert responses[0].attached.last_sequence == 1
        assert responses[0].attached.attach_number == 0
        assert to_seconds(responses[0].attached.detached_duration) > 0
        assert [one.delta for one in responses if one.HasField("delta")] == deltas
        units = [past for one in responses for past in one.kept.units]
        assert [past.sequence for past in units] == [0, 1]
        assert responses[-1].kept.is_last
        assert (await refused_take_over(rig)).reason is Reason.UNKNOWN_SESSION
        async with rig.opened(rig.grant(session_id="s"), SETTINGS) as client:
            await client.write(rebuild(*units))
            assert (await rebuilt(client)).context_token_count == context(2)


async def test_copy_of_a_rebuilt_session_has_the_units_of_both_workers() -> None:
    async with running_worker() as rig, kept(rig) as client:
        await client.write(rebuild(past(0), past(1), is_last=False))
        await rebuilt(client)
        assert (await refused(rig)).reason is Reason.NOT_READY
        await client.write(rebuild(past(2)))
        await rebuilt(client)
        await say(client, 3)
        async with attached(rig) as edge:
            copy, deltas, units = await read_copy(edge)
            assert [one.sequence for one in units] == [0, 1, 2, 3]
            assert [one.sequence for one in deltas] == [copy.last_sequence] == [3]
            await edge.end()


async def test_close_deletes_the_copy_unless_the_client_may_return() -> None:
    async with running_worker() as rig:
        for keeps in (False, True):
            async with kept(rig) as client:
                await say(client, 0)
                await client.close(keep_copy=keeps)
                await client.closed()
            await rig.all_free()
            if not keeps:
                assert (await refused_take_over(rig)).reason is Reason.UNKNOWN_SESSION
        assert (await taken_over(rig))[0].attached.last_sequence == 0


async def test_edge_that_wants_a_copy_no_more_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def write(*_: Any) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: 8")

    async with running_worker() as rig:
        await left_copy(rig)
        monkeypatch.setattr(kept_calls, "_write", write)  # the call was cancelled meanwhile
        with pytest.raises(AssertionError, match="OK"):
            await taken_over(rig)
        monkeypatch.undo()
        await taken_over(rig)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_copy_is_kept_until_the_edge_that_took_it_needs_it_no_more() -> None:
    async with running_worker() as rig:
        await left_copy(rig)
        async with taking_over(rig):
            assert (await refused_take_over(rig)).reason is Reason.NOT_READY
            assert (await refused(rig)).reason is Reason.NOT_READY
        async with asyncio.timeout(WITHIN_S):  # that edge is lost
            while (error := await refused_take_over_or_none(rig)) is not None:
                assert error.reason is Reason.NOT_READY
        assert (await taken_over(rig))[-1].kept.is_last


async def test_copy_that_an_edge_took_is_deleted_some_time_after_that_edge_is_lost() -> None:
    async with running_worker() as rig:
        async with kept(rig, keep(hold_s=0.0, within_s=0.2)) as client:
            await say(client, 0)
        await rig.all_free()
        async with taking_over(rig):
            end_s = time.monotonic() + 0.4  # longer than the copy is kept
            while time.monotonic() < end_s:
                assert (await refused_take_over(rig)).reason is Reason.NOT_READY
        async with asyncio.timeout(WITHIN_S):
            while (error := await refused_take_over_or_none(rig)) is None:
                pass
        assert error.reason in (Reason.NOT_READY, Reason.UNKNOWN_SESSION)


async def test_copy_is_deleted_when_its_time_is_over() -> None:
    async with running_worker() as rig, kept(rig, keep(hold_s=0.0, within_s=0.05)) as client:
        await say(client, 0)
        client.vanish()
        await rig.all_free()
        async with asyncio.timeout(WITHIN_S):
            while (error := await refused_take_over_or_none(rig)) is None:
                pass
        assert error.reason is Reason.UNKNOWN_SESSION


async def refused_take_over_or_none(rig: Rig) -> FabricError | None:
    """Ask for a copy that is too old, so that it stays."""
    error = await refused_take_over(rig, after_sequence=1 << 40)
    return None if error.reason is Reason.COPY_STALE else error


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"secret": "another"}, Reason.NOT_ALLOWED),
        ({"secret": ""}, Reason.NOT_ALLOWED),
        ({"session_id": "t"}, Reason.UNKNOWN_SESSION),
        ({"session_id": ""}, Reason.UNKNOWN_SESSION),
        ({"after_sequence": 1}, Reason.COPY_STALE),
    ],
    ids=["wrong", "empty", "other", "unnamed", "stale"],
)
async def test_refused_edge_changes_nothing(fields: dict[str, Any], reason: Reason) -> None:
    async with running_worker() as rig, kept(rig) as client:
        await say(client, 0)
        assert (await refused(rig, **fields)).reason is reason
        assert (await refused_take_over(rig, **fields)).reason is reason
        assert (await refused_take_over(rig)).reason is Reason.SLOT_OCCUPIED
        await say(client, 1)
        await client.end()


async def test_edge_with_another_client_changes_nothing() -> None:
    own: dict[str, Any] = {"client_sha256": digest_of("own")}
    other: dict[str, Any] = {"client_sha256": digest_of("other")}
    async with running_worker() as rig, kept(rig, keep(**own)) as client:
        await say(client, 0)
        for error in (await refused(rig, **other), await refused_take_over(rig, **other)):
            assert (error.reason, error.field) == (Reason.NOT_ALLOWED, "client_sha256")
        await say(client, 1)
        async with attached(rig) as edge:  # of an older release
            await read_copy(edge)
        async with attached(rig, **own) as edge:
            await read_copy(edge)
            await edge.close()
            await edge.closed()


async def test_session_without_a_copy_ends_with_its_stream() -> None:
    async with running_worker() as rig, rig.opened(rig.grant(session_id="s")) as client:
        await say(client, 0)
        client.vanish()
        await rig.all_free()
        assert (await refused(rig)).reason is Reason.UNKNOWN_SESSION


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_sha256": b"short"}, "keep.token_sha256"),
        ({"within_s": 0.0, "hold_s": 0.0}, "keep.within"),
        ({"within_s": 4000.0}, "keep.within"),
        ({"hold_s": LONG_S + 1}, "keep.hold"),
        ({"edge_note": b"n" * 4097}, "keep.edge_note"),
        ({"client_sha256": b"short"}, "keep.client_sha256"),
        ({"window_count": 1}, "keep.window_count"),
        ({"window_count": 65}, "keep.window_count"),
    ],
    ids=["digest", "no time", "long", "hold", "note", "client", "few windows", "many windows"],
)
async def test_bad_keep_is_refused(fields: dict[str, Any], field: str) -> None:
    async with running_worker() as rig, kept(rig, keep(**fields)) as client:
        error = await client.refused()
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)


async def test_keep_is_legal_only_after_opened_and_with_copies() -> None:
    request = session_pb2.ConverseRequest(keep=keep())
    async with running_worker() as rig:
        async with kept(rig) as client:
            await client.write(request)
            assert (await client.refused()).reason is Reason.OUT_OF_ORDER
        await rig.all_free()
        async with rig.opened(rig.grant(session_id="s")) as client:
            await say(client, 0)
            await client.write(request)
            assert (await client.refused()).reason is Reason.OUT_OF_ORDER
    async with running_worker(copy_bytes=0) as rig, rig.claimed(rig.grant()) as client:
        assert not (await client.open(SETTINGS)).accepts_keep
        await client.write(request)
        assert (await client.refused()).reason is Reason.OUT_OF_ORDER


async def test_note_that_is_too_long_fails_its_unit_only() -> None:
    async with running_worker() as rig, kept(rig) as client:
        await client.send(unit(0, edge_note=b"n" * 4097))
        failed = await client.failed()
        assert (failed.reason, failed.field) == (Reason.INVALID_FIELD, "edge_note")
        await say(client, 1)
        await client.end()


async def test_client_that_knows_of_a_failed_unit_gets_its_session() -> None:
    async with running_worker() as rig, kept(rig) as former:
        await say(former, 0)
        await former.send(unit(1, edge_note=b"n" * 4097))
        await former.failed()
        assert (await refused(rig, after_sequence=2)).reason is Reason.COPY_STALE
        async with attached(rig, after_sequence=1) as client:
            told = (await read_copy(client))[0]
            assert (told.last_sequence, told.received_sequence) == (0, 1)
            await say(client, 2)
            await client.close()
            await client.closed()


async def test_copy_above_its_bound_is_given_up_and_the_session_goes_on() -> None:
    async with running_worker(copy_bytes=100_000) as rig, kept(rig) as client:
        for sequence in range(4):  # 32 KB each
            await say(client, sequence)
        assert (await refused(rig)).reason is Reason.UNKNOWN_SESSION
        await say(client, 4)
        client.vanish()
        await rig.all_free()


async def test_the_copy_that_is_detached_for_the_longest_time_is_given_up_first() -> None:
    async with running_worker(copy_total_bytes=150_000) as rig:
        await left_copy(rig, 2)
        async with kept(rig, slot=1, session_id="t") as other:
            for sequence in range(3):
                await say(other, sequence)
            assert (await refused_take_over(rig)).reason is Reason.UNKNOWN_SESSION
            async with attached(rig, session_id="t") as edge:
                assert len((await read_copy(edge))[2]) == 3
                await edge.end()


async def test_drain_waits_until_an_edge_has_each_copy() -> None:
    async with running_worker() as rig:
        await left_copy(rig)
        rig.shutdown.drain()
        async with taking_over(rig), asyncio.timeout(WITHIN_S):
            await rig.task


async def test_session_without_an_edge_ends_when_an_operator_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servicers = list[SessionServicer]()
    add_to = SessionServicer.add_to

    def noted(servicer: SessionServicer, server: grpc.aio.Server) -> None:
        servicers.append(servicer)
        add_to(servicer, server)

    monkeypatch.setattr(SessionServicer, "add_to", noted)
    async with running_worker() as rig, kept(rig) as client:
        await say(client, 0)
        client.vanish()
        servicers[0].end(0, session_pb2.CLOSE_REASON_OPERATOR)
        await rig.all_free()
        assert (await refused_take_over(rig)).reason is Reason.UNKNOWN_SESSION
