"""The client of one HTTP request, when it reads the end of a stream late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from duplane.edge.close import Close, CloseReason
from duplane.edge.http.completion_client import CompletionClient
from duplane.edge.settings import Limits

LATE_S = 0.05  # much later than `Limits.send_s` in this file


async def closed_late(reason: CloseReason) -> tuple[bytes, bool]:
    """Close a stream whose connection has room again only after `LATE_S`.

    Returns what the connection took, and whether it was cut.
    """
    loop = asyncio.get_running_loop()
    room, written = asyncio.Event(), bytearray()

    async def write(data: bytes, **_: Any) -> None:
        await room.wait()
        written.extend(data)

    writer = Mock(write=write, write_eof=AsyncMock(), write_headers=AsyncMock(), length=None)
    protocol = Mock(ssl_context=None, peername=None)
    protocol.write_timeout.is_expired = False
    request = make_mocked_request("POST", "/", writer=writer, protocol=protocol)
    dialect: Any = SimpleNamespace(is_streaming=True)
    client = CompletionClient(request, b"{}", dialect, Limits(client_s=LATE_S / 50))
    serving = asyncio.ensure_future(client.serve(Mock(receive=AsyncMock())))
    client.send([b"1", b"2"])
    loop.call_later(LATE_S, room.set)
    await client.close(Close(reason), 1000)
    serving.cancel()
    return bytes(written), protocol.abort.called


async def test_client_that_reads_slowly_gets_the_end_of_its_answer() -> None:
    told = await closed_late(CloseReason.ANSWERED)
    assert told == (b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n", False)


@pytest.mark.parametrize("reason", [CloseReason.FAILED, CloseReason.SHUTDOWN])
async def test_stream_without_an_answer_waits_for_its_client_only_for_a_while(
    reason: CloseReason,
) -> None:
    assert await closed_late(reason) == (b"", True)
