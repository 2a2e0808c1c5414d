"""Names of inputs, closing and cancelling at any time, and connections that break in each state."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson
import pytest
from support.protocols.client_server import LISTEN, SPEECH, begin, end, served, talk, tell, told
from support.time_limits import WITHIN_S, until
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from duplane.client import (
    ConnectionLostError,
    DuplexError,
    DuplexSession,
    InputError,
    ServerError,
    encode,
)
from duplane.client.connecting import MAX_MESSAGE_BYTES, full_url
from duplane.client.events import OutputReader


async def test_seed_and_the_name_of_an_input_reach_the_server_in_b_only() -> None:
    told_settings: list[dict[str, Any]] = []

    async def answer(socket: ServerConnection) -> None:
        told_settings.append(await begin(socket))
        for _ in range(2):
            input_id = (await told(socket))["input"]["input_id"]
            await tell(socket, **LISTEN, chunk_index=0, input_id=input_id)
        error = {"code": "invalid_payload", "message": "input.audio: no"}
        await tell(socket, type="error", error=error, input_id="sound")
        await end(socket)

    async with served(answer) as server, DuplexSession(server.url, seed=7) as session:
        await session.send(bytes(640), input_id="sound")
        await session.send(encode(bytes(640)), input_id="more")
        assert [(await anext(session)).input_id for _ in range(2)] == ["sound", "more"]
        with pytest.raises(InputError) as refused:
            await anext(session)
        assert refused.value.input_id == "sound"
        assert told_settings[0]["payload"]["seed"] == 7
    with pytest.raises(ValueError, match="seed"):
        DuplexSession(server.url, dialect="A", seed=7)
    with pytest.raises(ValueError, match="input_id"):
        await DuplexSession(server.url, dialect="A").send(bytes(640), input_id="sound")


PARTS: list[tuple[int | None, int, dict[str, Any]]] = [  # the index, with and without numbers
    (None, 0, LISTEN),
    (0, 1, LISTEN),
    (1, 2, SPEECH | {"text": "a"}),
    (None, 2, SPEECH | {"kind": "audio", "audio": "AAAAAA=="}),
    (2, 3, SPEECH | {"text": "b"}),
    (None, 3, LISTEN | {"response_id": "r"}),
    (3, 4, LISTEN),
]


def test_units_of_a_server_that_numbers_none_are_counted() -> None:
    plain, numbered = OutputReader(), OutputReader()
    plain.begin({"type": "session.created"})
    numbered.begin({"type": "session.created", "usage": {}})
    for number, counted, event in PARTS:
        output = plain.read(event, 0.0)
        assert output
        assert output.index == counted
        output = numbered.read(event | ({} if number is None else {"chunk_index": number}), 0.0)
        # The answer to an append that completes no unit has no number and no content.
        assert (output is None) is (number is None and event is LISTEN)


async def test_audio_that_cannot_be_read_is_an_error_of_the_server() -> None:
    event = SPEECH | {"kind": "audio", "chunk_index": 0}
    for audio in ("?", "AAAA"):
        output = OutputReader().read(event | {"audio": audio}, 0.0)
        assert output
        with pytest.raises(ServerError, match="base64 of float32"):
            _ = output.audio
    with pytest.raises(ServerError, match="cannot be read"):
        OutputReader().read(event | {"chunk_index": "x"}, 0.0)


async def test_outputs_that_come_during_a_close_are_not_lost() -> None:
    async def answer(socket: ServerConnection) -> None:
        await begin(socket)
        while (await told(socket))["type"] != "session.close":
            pass
        for index in range(3):
            await tell(socket, **SPEECH, text=str(index), chunk_index=index)
        await tell(socket, type="session.closed", reason="user_stop")
        await socket.wait_closed()

    async with served(answer) as server:
        for is_read_meanwhile in (False, True):
            session = await DuplexSession(server.url).connect()
            words: list[str] = []

            async def read(session: DuplexSession, words: list[str]) -> None:
                words += [output.text async for output in session]

            reading = asyncio.create_task(read(session, words)) if is_read_meanwhile else None
            await asyncio.sleep(0)
            await session.close()
            await (reading or read(session, words))
            assert words == ["0", "1", "2"]
            assert session.end
            assert session.end.reason == "user_stop"


async def test_session_that_is_closed_in_the_queue_does_not_try_again() -> None:
    async def let_wait(socket: ServerConnection) -> None:
        await tell(socket, type="session.queued", position=1, estimated_wait_s=0, queue_length=1)
        await end(socket)

    async with served(let_wait) as server:
        closes: list[asyncio.Task[None]] = []
        session = DuplexSession(
            server.url, on_queue=lambda _: closes.append(asyncio.create_task(session.close()))
        )
        with pytest.raises(DuplexError, match="the session is closed"):
            await session.connect()
        await asyncio.gather(*closes)
        assert len(server.paths) == 1


async def test_session_that_is_closed_between_two_attempts_does_not_try_again() -> None:
    async with served(talk) as server:
        server.refusals = [(503, "200")]
        session = DuplexSession(server.url)
        connecting = asyncio.create_task(session.connect())
        await server.has_refused.wait()
        await session.close()
        with pytest.raises(DuplexError):
            await connecting
        assert len(server.paths) == 1


async def test_cancelled_calls_leave_no_connection_and_no_task() -> None:
    states = ["upgrade", "queue", "iteration", "close"]
    has_begun = asyncio.Event()
    gone: list[str] = []

    async def stall(socket: ServerConnection) -> None:
        state = states[len(gone)]
        if state in ("iteration", "close"):
            await begin(socket)
        if state == "close":
            await told(socket)
        has_begun.set()
        with contextlib.suppress(ConnectionClosed):
            await told(socket)
        await socket.wait_closed()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        has_begun.set()
        await reader.read()
        writer.close()

    async def use(url: str, state: str) -> None:
        async with DuplexSession(url) as session:
            if state == "close":
                await session.close()
            await anext(session)

    async def have_ended() -> bool:
        return not asyncio.all_tasks() - before

    async with served(stall) as server, await asyncio.start_server(deaf, "127.0.0.1", 0) as silent:
        nowhere = f"ws://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        before = asyncio.all_tasks()
        for state in states:
            has_begun.clear()
            using = asyncio.create_task(use(nowhere if state == "upgrade" else server.url, state))
            await has_begun.wait()
            using.cancel()
            with pytest.raises(asyncio.CancelledError):
                await using
            gone.append(state)
            # Also those of the servers end.
            await until(have_ended, WITHIN_S)


async def test_connection_that_breaks_in_each_state_is_an_error_with_its_reason() -> None:
    states = ["queue", "settings", "talk", "close"]

    async def vanish(socket: ServerConnection) -> None:
        state = states.pop(0)
        if state == "settings":
            await tell(socket, type="session.queue_done")
            await told(socket)
        if state in ("talk", "close"):
            await begin(socket)
        if state == "close":
            await told(socket)
        socket.transport.abort()

    async with served(vanish) as server:
        for _ in range(2):
            with pytest.raises(ConnectionLostError):
                await DuplexSession(server.url, attempts=1).connect()
        session = await DuplexSession(server.url).connect()
        for _ in range(2):  # it stays an error
            with pytest.raises(ConnectionLostError):
                await anext(session)
        await session.close()
        session = await DuplexSession(server.url).connect()
        await session.close()
        assert session.end
        assert [output async for output in session] == []


async def test_message_that_is_too_long_ends_the_session() -> None:
    async def flood(socket: ServerConnection) -> None:
        await begin(socket)
        await socket.send("x" * (MAX_MESSAGE_BYTES + 1))
        await socket.wait_closed()

    async with served(flood) as server, DuplexSession(server.url) as session:
        with pytest.raises(ServerError, match="longer than"):
            await anext(session)


def test_mode_and_model_replace_those_of_the_address() -> None:
    assert full_url("http://h:1/?mode=video&a=b", "audio", None) == (
        "ws://h:1/v1/realtime?a=b&mode=audio"
    )
    assert full_url("wss://h/p?model=x", "audio", "m") == "wss://h/p?mode=audio&model=m"


def test_key_that_no_header_can_have_is_refused_without_showing_it() -> None:
    for key in ("sec\n", "a secret", "sé"):
        with pytest.raises(ValueError, match="key must") as refused:
            DuplexSession("ws://localhost", key=key)
        assert key.strip() not in str(refused.value)


async def test_reason_why_there_is_no_connection_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\x15\x03\x01\x00\x02\x02\x0a")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "")
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        with pytest.raises(ConnectionLostError, match="no connection"):
            await DuplexSession("ws://localhost.invalid", attempts=1).connect()
        with pytest.raises(ConnectionLostError, match="try wss://"):
            await DuplexSession(f"ws://{address}", attempts=1, proxy=False).connect()


async def test_another_parser_may_read_the_events() -> None:
    async with served(talk) as server, DuplexSession(server.url, loads=orjson.loads) as session:
        assert session.created["session_id"] == "s"
