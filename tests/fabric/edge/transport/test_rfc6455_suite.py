"""The Autobahn cases for RFC 6455, which kosoku runs against the edge's WebSocket class.

The server of these tests sends each text back. The edge refuses binary messages with code 1003, so
the cases that want such a message back can only show this refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.edge.live_edge import LiveEdge, begin_raw, live_edge
from support.edge.raw_client import CONTINUATION, TEXT, RawClient, frame
from support.time_limits import WITHIN_S

from duplane.edge.close import CLOSE_CODES, Close
from duplane.edge.settings import Limits
from duplane.edge.transport.client_protocol import ConnectionLimiter, client_protocols
from duplane.edge.transport.collection_time import CollectionTime
from duplane.edge.transport.websocket import WebSocket

CLOSE = 0x8
BINARY_CASES = ["1.2.*", "9.2.*", "9.4.*", "9.6.*", "9.8.*"]
# The edge does not compress (12, 13).
EXCLUDED_CASES = [*BINARY_CASES, "12.*", "13.*"]
LIMITS = Limits(read_share=1.0)  # the longest cases send 16 MB as fast as they can


class Echo:
    """A receiver that sends each text back."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.close = asyncio.get_running_loop().create_future()

    async def receive(self, message: bytes, waited_s: float = 0.0) -> None:
        self._socket.send([message])

    def end(self, close: Close) -> None:
        if not self.close.done():
            self.close.set_result(close)


async def echo(request: web.Request) -> web.StreamResponse:
    socket = WebSocket(request, LIMITS, LIMITS.chat_message_bytes)
    async with socket.opened() as response:
        receiver = Echo(socket)
        serving = asyncio.create_task(socket.serve(receiver))
        close: Close = await receiver.close
        await socket.close(close, CLOSE_CODES[close.reason])
        await asyncio.wait({serving})
    return response


@contextlib.asynccontextmanager
async def echo_server() -> AsyncGenerator[str]:
    """Run a server that echoes; yield its URL."""
    application = web.Application()
    application.router.add_get("/", echo)
    http = web.AppRunner(application, handler_cancellation=True)
    await http.setup()
    assert http.server
    limiter = ConnectionLimiter(LIMITS, ())
    with CollectionTime().counted() as collections:
        protocols = client_protocols(http.server, LIMITS, limiter, collections, access_log=None)
        server = await asyncio.get_running_loop().create_server(protocols, "127.0.0.1", 0)
        try:
            yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        finally:
            server.close()
            await http.cleanup()


# Runs cases of the suite, and prints the results as JSON. This is a process of its own, because the
# suite adds folders to `sys.path` that hide other packages.
SUITE = """
import asyncio, json, os, sys
import kosoku

async def run(url, selection):
    try:
        results = await kosoku.run_fuzzingclient(url, concurrency=4, **selection)
    except kosoku.FailureError as error:
        results = error.results
    return [
        {
            "case": result.case_id,
            "has_passed": result.passed,
            "behavior": result.behavior.value,
            "behavior_close": result.behavior_close.value,
            "close_code": result.remote_close_code,
            "expectation": str(result.expectation),
        }
        for result in results
    ]

url, selection = json.loads(sys.argv[1])
print(json.dumps(asyncio.run(run(url, selection))), flush=True)
os._exit(0)  # the compiled part of the package often aborts while the interpreter ends
"""


async def run_cases(**selection: Sequence[str]) -> list[dict[str, Any]]:
    """Run cases of the suite; return all results, also of the cases that failed."""
    if importlib.util.find_spec("kosoku") is None:
        pytest.skip("the suite is not installed: make setup")
    async with echo_server() as url:
        suite = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SUITE, orjson.dumps((url, selection)).decode()),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await suite.communicate()
    assert suite.returncode == 0
    return orjson.loads(output.splitlines()[-1])


@pytest.mark.slow
async def test_every_case_of_the_suite_passes() -> None:
    results = await run_cases(exclude_cases=EXCLUDED_CASES)
    assert len(results) > 250
    assert [result for result in results if not result["has_passed"]] == []


@pytest.mark.slow
async def test_every_binary_message_is_refused_with_1003() -> None:
    results = await run_cases(cases=BINARY_CASES)
    assert len(results) > 30
    assert {result["close_code"] for result in results} == {1003}


# --- the same rules against a whole edge, without the suite ---


async def close_code_after(edge: LiveEdge, *frames: bytes) -> int:
    """Send frames in a running session; return the code of the edge's close frame."""
    async with asyncio.timeout(WITHIN_S), RawClient(edge.edge.address) as client:
        await begin_raw(edge, client)
        for data in frames:
            await client.send(data)
        answer = await client.read_all()
    start = answer.rindex(bytes((0x80 | CLOSE,)))
    return int.from_bytes(answer[start + 2 : start + 4], "big")


@pytest.mark.parametrize(
    "frames",
    [
        [frame(TEXT, b"\xff\xfe{}")],
        [frame(TEXT, b'{"type":"\xc3"}')],
        [frame(TEXT, b'{"type":"\xed\xa0\x80"}')],
        [frame(TEXT, b" " * 100_000 + b"\xc3")],
        [frame(TEXT, b'{"type":"\xc3', is_last=False), frame(CONTINUATION, b'"}')],
    ],
    ids=["no lead byte", "no second byte", "surrogate", "cut at the end", "fragments"],
)
async def test_text_that_is_not_utf8_closes_with_1007(frames: list[bytes]) -> None:
    async with live_edge(Limits(close_s=0.1)) as edge:
        assert await close_code_after(edge, *frames) == 1007


@pytest.mark.parametrize(
    ("code", "answered"), [(1006, 1002), (1005, 1002), (5000, 1002), (1000, 1000), (4999, 4999)]
)
async def test_close_code_that_no_frame_may_have_is_answered_with_1002(
    code: int, answered: int
) -> None:
    async with live_edge(Limits(close_s=0.1)) as edge:
        assert await close_code_after(edge, frame(CLOSE, code.to_bytes(2, "big"))) == answered


async def test_character_may_be_split_between_fragments() -> None:
    async with live_edge() as edge:
        text = '{"type":"é"}'.encode()
        middle = text.index(b"\xc3") + 1
        async with asyncio.timeout(WITHIN_S), RawClient(edge.edge.address) as client:
            await begin_raw(edge, client)
            await client.send(frame(TEXT, text[:middle], is_last=False))
            await client.send(frame(CONTINUATION, text[middle:]))
            assert b"unknown_event" in await client.read_until(b"unknown_event")
