"""The outgoing side of a worker's stream when the stream ends during a write."""

from __future__ import annotations

from typing import Any, cast

import grpc.aio
import pytest

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.rpc.worker_stream import WorkerStream
from duplane.scheduler.store.base import Worker


class EndedContext:
    """A call that has ended, so that every write fails."""

    async def write(self, message: registry_pb2.AttachResponse) -> None:
        raise grpc.aio.BaseError(f"cannot write {message}")


async def test_a_write_to_an_ended_stream_is_an_error_of_the_fabric() -> None:
    stream = WorkerStream(Worker(1, registry_pb2.Register(worker_id="w"), False))
    stream.send(registry_pb2.AttachResponse())
    with pytest.raises(FabricError) as raised:
        await stream.write_messages(cast("Any", EndedContext()))
    assert raised.value.reason is Reason.UNAVAILABLE
