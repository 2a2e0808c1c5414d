"""The start of a connection: the first bytes, the size of the HTTP head, the file descriptor."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.edge.live_edge import begin, end, exchange, live_edge
from support.time_limits import WITHIN_S

from duplane.edge.server import make_room
from duplane.edge.settings import Limits
from duplane.edge.transport.client_protocol import MAX_HEAD_BYTES

pytestmark = pytest.mark.timing

QUICK = replace(Limits(), client_s=0.3, close_s=0.1)
UPGRADE = (
    b"GET /v1/realtime?mode=audio HTTP/1.1\r\nHost: localhost\r\nconnection: Upgrade\r\n"
    b"uPGRADE:\twebSocket \r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)

# The beginning of a request of an operator.
PUT = b"PUT /api/config/eta HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def said(address: str, *pieces: bytes) -> bytes:
    """Send the pieces one by one; return all bytes that the edge sends before it closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(WITHIN_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_handshake_in_pieces_becomes_a_websocket() -> None:
    async with live_edge() as edge:
        host, _, port = edge.edge.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(WITHIN_S):
            for index in range(len(UPGRADE)):
                writer.write(UPGRADE[index : index + 1])
                await writer.drain()
                await asyncio.sleep(0)
            assert await reader.readline() == b"HTTP/1.1 101 Switching Protocols\r\n"
            await reader.readuntil(b'{"type":"session.queue_done"}')
        writer.close()


async def test_websockets_and_http_share_the_port() -> None:
    async with live_edge() as edge, edge.connect() as client:
        await begin(client)
        assert (await edge.get("/health"))[0] == 200
        await exchange(client)
        await end(client)


async def test_http_in_pieces_is_answered_once_and_closed() -> None:
    async with live_edge() as edge:
        pieces = (b"GET /health HT", b"TP/1.1\r\nHost: localhost\r\n\r", b"\n")
        answer = await said(edge.edge.address, *pieces)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.count(b"HTTP/1.1") == 1


async def test_words_about_upgrading_in_a_body_do_not_upgrade() -> None:
    body = b"Upgrade: websocket\r\n\r\n"
    head = PUT + b"Content-Length: %d\r\n\r\n"
    request = head % len(body)
    async with live_edge() as edge:
        assert b" 422 " in (await said(edge.edge.address, request + body)).split(b"\r\n")[0]


@pytest.mark.parametrize(
    "head",
    [b"", b"\r\n\r\n", b"GET /health HTTP/1.1\r\n", UPGRADE[:-2]],
    ids=["silent", "empty lines", "unfinished", "unfinished upgrade"],
)
async def test_client_that_does_not_finish_its_head_is_cut(head: bytes) -> None:
    async with live_edge(QUICK) as edge:
        assert await said(edge.edge.address, head) == b""


async def test_client_that_does_not_finish_its_body_is_told_and_closed() -> None:
    request = PUT + b"Content-Length: 9\r\n\r\n{"
    async with live_edge(QUICK) as edge:
        assert (await said(edge.edge.address, request)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("head", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"nonsense\r\n\r\n"])
async def test_what_is_no_http_is_refused(head: bytes) -> None:
    async with live_edge() as edge:
        answer = await said(edge.edge.address, head)
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b"\r\nServer:" not in answer
    assert answer.endswith(b'{"detail":"the request cannot be read"}')


async def test_head_above_its_bound_is_refused_while_its_client_waits() -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
    async with live_edge() as edge:
        answer = await said(edge.edge.address, head.ljust(MAX_HEAD_BYTES + 1, b"x"))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.endswith(b'{"detail":"the head of a request must be at most 32768 bytes"}')


@pytest.mark.parametrize("rest", [b"", b"GET /health HTTP/1.1\r\n"], ids=["nothing", "a line"])
async def test_blank_lines_are_no_head(rest: bytes) -> None:
    async with live_edge(QUICK) as edge:
        assert await said(edge.edge.address, b"\r\n" * 1000, b"\r\n" + rest) == b""


async def test_blank_lines_before_a_head_are_passed_over() -> None:
    async with live_edge() as edge:
        request = b"\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert (await said(edge.edge.address, request)).startswith(b"HTTP/1.1 200 ")


async def test_websocket_at_a_wrong_path_is_refused() -> None:
    async with live_edge() as edge:
        answer = await said(edge.edge.address, UPGRADE.replace(b"/v1/realtime", b"/nowhere"))
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert answer.endswith(b'{"detail":"this path serves no WebSocket"}')


async def test_undecided_connections_end_with_the_edge() -> None:
    async with live_edge() as edge:
        saying = asyncio.ensure_future(said(edge.edge.address, b"GET "))
        # The edge accepts connections in order: the answer to this request shows that the edge
        # has accepted the connection of `saying`.
        assert (await edge.get("/health"))[0] == 200
    assert await saying == b""


@pytest.fixture
def few_files() -> Iterator[int]:
    """Lower the process's limit of open files; yield the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_process_gets_a_file_for_every_connection(few_files: int) -> None:
    make_room(1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > 1000
    make_room(10)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_system_that_allows_fewer_files_is_told_of(
    few_files: int, caplog: pytest.LogCaptureFixture
) -> None:
    if few_files == resource.RLIM_INFINITY:
        pytest.skip("this system allows as many as anybody wants")
    make_room(few_files)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files
    assert f"allows {few_files} open files" in caplog.text


GZIPPED = PUT + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"
BAD_REQUESTS = [
    b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1 x\r\nHost: localhost\r\n\r\n",
    PUT + b"Content-Length: -1\r\n\r\n",
]


async def test_compressed_body_is_taken_as_it_is_and_refused() -> None:
    async with live_edge() as edge:
        assert (await said(edge.edge.address, GZIPPED)).startswith(b"HTTP/1.1 422 ")


@pytest.mark.parametrize("request_bytes", [*BAD_REQUESTS, GZIPPED])
async def test_strangers_cannot_fill_the_log(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_edge() as edge:
        assert b" 4" in (await said(edge.edge.address, request_bytes))[:12]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("head", [b"PRI /x HTTP/1.1\r\n\r\n", b"\r\nPRI * HTTP/2.0\r\n\r\n"])
async def test_preface_of_http_2_is_cut(head: bytes) -> None:
    async with live_edge() as edge:
        assert await said(edge.edge.address, head) == b""
