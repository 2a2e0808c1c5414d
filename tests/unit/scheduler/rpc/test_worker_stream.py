"""The outgoing side of a worker's stream."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc.aio
import pytest
from support.time_limits import WITHIN_S

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.rpc import worker_stream
from duplane.scheduler.rpc.worker_stream import WorkerStream
from duplane.scheduler.store.base import Worker
from duplane.scheduler.validation import MAX_SLOT_COUNT


class EndedContext:
    """A call that has ended, so that every write fails."""

    async def write(self, message: registry_pb2.AttachResponse) -> None:
        raise grpc.aio.BaseError(f"cannot write {message}")


async def test_a_write_to_an_ended_stream_is_an_error_of_the_fabric() -> None:
    stream = WorkerStream(Worker.of(1, registry_pb2.Register(worker_id="w")))
    stream.send(registry_pb2.AttachResponse())
    with pytest.raises(FabricError) as raised:
        await stream.write_messages(cast("Any", EndedContext()))
    assert raised.value.reason is Reason.UNAVAILABLE


class SlowContext:
    """A call whose write ends only when it is told to."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.has_ended = False

    async def write(self, message: registry_pb2.AttachResponse) -> None:
        del message
        self.has_begun.set()
        await self.may_end.wait()
        self.has_ended = True


async def test_cancelled_stream_ends_its_write_before_its_error_can_be_sent() -> None:
    stream, context = new_stream(), SlowContext()
    stream.send(registry_pb2.AttachResponse())
    writing = asyncio.create_task(stream.write_messages(cast("Any", context)))
    await context.has_begun.wait()
    writing.cancel()
    context.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert context.has_ended


async def test_cancelled_stream_does_not_wait_for_a_worker_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_stream, "_LAST_WRITE_S", 0.01)
    stream, context = new_stream(), SlowContext()
    stream.send(registry_pb2.AttachResponse())
    writing = asyncio.create_task(stream.write_messages(cast("Any", context)))
    await context.has_begun.wait()
    writing.cancel()
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(asyncio.CancelledError):
            await writing


class Reader:
    """A worker that reads only `count` messages."""

    def __init__(self, count: int) -> None:
        self.received: list[registry_pb2.AttachResponse] = []
        self.has_all = asyncio.Event()
        self._count = count

    async def write(self, message: registry_pb2.AttachResponse) -> None:
        if len(self.received) == self._count:
            await asyncio.Event().wait()
        self.received.append(message)
        if len(self.received) == self._count:
            self.has_all.set()


def new_stream() -> WorkerStream:
    return WorkerStream(Worker.of(1, registry_pb2.Register(worker_id="w")))


def revoke(slot: int, number: int, lease_id: str = "") -> registry_pb2.AttachResponse:
    message = registry_pb2.Revoke(slot=slot, fencing_number=number, lease_id=lease_id)
    return registry_pb2.AttachResponse(revoke=message)


async def received(stream: WorkerStream, count: int) -> list[registry_pb2.AttachResponse]:
    """Let a worker read the waiting messages, and return them. Exactly `count` must wait."""
    reader = Reader(count)
    writing = asyncio.create_task(stream.write_messages(cast("Any", reader)))
    async with asyncio.timeout(WITHIN_S):
        await reader.has_all.wait()
    assert not stream._outbox
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    return reader.received


async def test_stream_outlasts_revokes_of_all_slots_at_once() -> None:
    stream = new_stream()
    failing = asyncio.create_task(stream.raise_failure())
    revokes = [revoke(slot, 10 + slot, f"lease {slot}") for slot in range(MAX_SLOT_COUNT)]
    for message in revokes:
        stream.send(message)
    assert await received(stream, MAX_SLOT_COUNT) == revokes
    assert not failing.done()
    failing.cancel()


async def test_messages_that_a_worker_does_not_read_are_bounded_and_none_is_lost() -> None:
    stream = new_stream()
    for number in range(1, 2000):
        stream.send(registry_pb2.AttachResponse(progress=registry_pb2.Progress(fencing_number=1)))
        stream.send(revoke(0, number, f"lease {number}"))
        stream.send(revoke(0, number))  # repeated without a lease
        stream.send(revoke(1, 2000 - number, f"lease {2000 - number}"))
    progress, first, second = await received(stream, 3)
    assert progress.HasField("progress")
    assert first == revoke(0, 1999, "lease 1999")
    assert second == revoke(1, 1999, "lease 1999")


async def test_of_requests_to_drain_and_to_serve_again_only_the_last_one_is_sent() -> None:
    stream = new_stream()
    drain = registry_pb2.AttachResponse(drain=registry_pb2.Drain())
    undrain = registry_pb2.AttachResponse(undrain=registry_pb2.Undrain())
    for message in (drain, undrain, drain):
        stream.send(message)
    assert await received(stream, 1) == [drain]
    for message in (drain, undrain):
        stream.send(message)
    assert await received(stream, 1) == [undrain]


async def test_stream_of_a_worker_that_does_not_read_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_stream, "WRITE_TIMEOUT_S", 0.01)
    stream = new_stream()
    stream.send(revoke(0, 1))
    with pytest.raises(FabricError, match="does not read") as ended:
        await stream.write_messages(cast("Any", Reader(0)))
    assert ended.value.reason is Reason.UNAVAILABLE
