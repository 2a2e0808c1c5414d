"""A Converse call whose connection is lost while the client ends the call."""

from __future__ import annotations

from typing import Any, cast

import grpc.aio
import pytest

from duplane.fabric.converse import ConverseStream
from duplane.fabric.v1 import lease_pb2, session_pb2


class LostCall:
    """A call whose connection is lost while it is half-closed."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def done(self) -> bool:
        return False

    async def done_writing(self) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def lost() -> LostCall:
    return LostCall()


async def test_session_whose_connection_is_lost_at_its_end_is_cancelled(lost: LostCall) -> None:
    await ConverseStream(cast(Any, lost), lease_pb2.Granted()).finish()
    assert lost.is_cancelled


async def test_input_whose_connection_is_lost_at_its_end_causes_no_error(lost: LostCall) -> None:
    await ConverseStream(cast(Any, lost), lease_pb2.Granted()).end_input()


class DrainedCall:
    """A call to a worker whose drain is taken back before it has opened the conversation."""

    def __init__(self) -> None:
        self._responses = [
            session_pb2.ConverseResponse(leaving=session_pb2.Leaving()),
            session_pb2.ConverseResponse(staying=session_pb2.Staying()),
            session_pb2.ConverseResponse(opened=session_pb2.Opened(model_digest="m")),
        ]

    async def write(self, request: session_pb2.ConverseRequest) -> None:
        assert request.HasField("open")

    async def read(self) -> session_pb2.ConverseResponse:
        return self._responses.pop(0)


async def test_drain_that_is_taken_back_does_not_disturb_the_opening() -> None:
    stream = ConverseStream(cast(Any, DrainedCall()), lease_pb2.Granted())
    assert (await stream.open(session_pb2.Open())).model_digest == "m"
