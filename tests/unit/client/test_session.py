"""Beginning, trying again, interrupting and pausing, with servers of a few lines."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from support.protocols.client_server import LISTEN, SPEECH, begin, end, served, talk, tell, told
from websockets.asyncio.server import ServerConnection

from duplane.client import (
    BusyError,
    ConnectionLostError,
    DuplexError,
    DuplexSession,
    InputError,
    QueuePlace,
    RefusedError,
    ServerError,
    retry_wait_s,
)
from duplane.client.errors import error_of_close, error_of_status
from duplane.client.events import Event, queue_place
from duplane.edge.payload.media import decode_audio
from duplane.fabric.audio import samples_from_pcm


async def test_client_waits_as_long_as_a_busy_server_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(talk) as server:
        server.refusals = [(503, "7"), (429, "9")]
        waits: list[float] = []

        def at_once(error: DuplexError, attempt: int, base_s: float) -> float:
            waits.append(retry_wait_s(error, attempt, base_s) or 0)
            return 0

        monkeypatch.setattr("duplane.client.session.retry_wait_s", at_once)
        session = await DuplexSession(server.url, key="secret", model="m").connect()
        await session.close()
        assert waits == [7, 9]
        assert server.paths[-1] == "/v1/realtime?mode=audio&model=m"
        assert server.keys == ["Bearer secret"] * 3


async def test_client_tries_again_after_a_full_queue() -> None:
    left = ["queue_full", "worker_busy"]

    async def refuse(socket: ServerConnection) -> None:
        if not left:
            return await talk(socket)
        error = {"code": left.pop(0), "message": "later", "type": "server_error"}
        await tell(socket, type="error", error=error)
        return await socket.close(1013)

    async with served(refuse) as server:
        async with DuplexSession(server.url, retry_base_s=0.001) as session:
            assert session.created["session_id"] == "s"
        assert not left
        left = ["queue_full"] * 3
        with pytest.raises(BusyError, match="queue_full: later") as caught:
            await DuplexSession(server.url, attempts=2, retry_base_s=0.001).connect()
        assert (caught.value.code, caught.value.close_code) == ("queue_full", 1013)
        assert len(left) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_client_does_not_repeat_a_refused_credential(status: int) -> None:
    async with served(talk) as server:
        server.refusals = [(status, "")]
        with pytest.raises(RefusedError, match=str(status)):
            await DuplexSession(server.url).connect()
        assert len(server.paths) == 1


async def test_refused_settings_are_an_error_of_the_input() -> None:
    async def refuse(socket: ServerConnection) -> None:
        await tell(socket, type="session.queue_done")
        await told(socket)
        error = {"code": "invalid_payload", "message": "session.ref_audio: no", "type": "x"}
        await tell(socket, type="error", error=error)
        await socket.wait_closed()

    async with served(refuse) as server:
        with pytest.raises(InputError, match=r"session\.ref_audio"):
            await DuplexSession(server.url, dialect="A").connect()
        assert len(server.paths) == 1


async def test_broken_conversation_is_an_error_and_is_not_begun_again() -> None:
    async def vanish(socket: ServerConnection) -> None:
        await begin(socket)
        await told(socket)
        socket.transport.abort()

    async with served(vanish) as server:
        session = await DuplexSession(server.url).connect()
        assert await session.send(bytes(640)) is True
        with pytest.raises(ConnectionLostError):
            await anext(session)
        assert await session.send(bytes(640)) is False
        await session.close()
        assert len(server.paths) == 1


async def test_nobody_listens_at_the_address() -> None:
    with socket.socket() as deaf:  # bound, so that no other server gets the port
        deaf.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(ConnectionLostError, match="no connection"):
            await DuplexSession(url, attempts=2, retry_base_s=0.001).connect()


async def test_client_gives_up_its_place_after_the_time_limit() -> None:
    async def let_wait(socket: ServerConnection) -> None:
        await tell(socket, type="session.queued", position=1, estimated_wait_s=0, queue_length=1)
        await socket.wait_closed()

    async with served(let_wait) as server:
        session = DuplexSession(server.url, attempts=1, queue_timeout_s=0.1)
        with pytest.raises(BusyError, match="no slot within"):
            await session.connect()


def test_wait_that_nobody_knows_is_none() -> None:
    event = {"type": "session.queued", "position": 1, "estimated_wait_s": 0, "queue_length": 2}
    assert queue_place(event) == QueuePlace(1, 2, None)
    assert queue_place(event | {"estimated_wait_s": 7.5}).estimated_wait_s == 7.5
    assert queue_place(event | {"reason": "no worker"}).reason == "no worker"


async def test_interruption_makes_the_model_listen_and_drops_the_rest_of_the_turn() -> None:
    got: list[bool] = []

    async def answer(socket: ServerConnection) -> None:
        await begin(socket)
        for unit in range(4):
            got.append("force_listen" in (await told(socket))["input"])
            if unit == 2:
                await tell(socket, **SPEECH, text="dropped", chunk_index=1)
                await tell(socket, **LISTEN, chunk_index=2, response_id="r", interrupted=True)
            else:
                await tell(socket, **SPEECH, text=f"word {unit}", chunk_index=unit)
        await end(socket)

    async with served(answer) as server, DuplexSession(server.url) as session:
        await session.send(bytes(320))
        assert (await anext(session)).text == "word 0"
        await session.send(bytes(320))
        assert (await anext(session)).text == "word 1"
        session.interrupt()
        await session.send(bytes(320))
        listens = await anext(session)
        assert (listens.speaks, listens.interrupted, listens.end_of_turn) == (False, True, True)
        await session.send(bytes(320))
        assert (await anext(session)).text == "word 3"
    assert got == [False, False, True, False]


async def test_paused_session_sends_nothing() -> None:
    events: list[Event] = []

    async def note(socket: ServerConnection) -> None:
        await begin(socket)
        events.append(await told(socket))
        await end(socket)

    async with served(note) as server, DuplexSession(server.url) as session:
        session.pause()
        assert await session.send(bytes(32_000)) is False
        session.resume()
        assert await session.send(bytes(640)) is True
    (event,) = events
    assert len(decode_audio(event["input"]["audio"], "audio", 30)) == 4 * 320


@pytest.mark.parametrize("uplink", ["int16", "float32"])
async def test_edge_hears_what_was_sent(uplink: Any) -> None:
    heard: list[np.ndarray[Any, Any]] = []

    async def note(socket: ServerConnection) -> None:
        await begin(socket)
        for _ in range(2):  # two appends, because each has at most a second
            pcm = decode_audio((await told(socket))["input"]["audio"], "audio", 30)
            heard.append(samples_from_pcm(pcm))
        await end(socket)

    # numpy declares its buffers for Python 3.12 and newer only.
    sound: Any = np.sin(np.arange(24_000, dtype=np.float32) / 7) / 2
    async with served(note) as server, DuplexSession(server.url, uplink=uplink) as session:
        await session.send(sound)
        with pytest.raises(ValueError, match="finite"):
            await session.send(sound * np.float32(np.nan))
    assert [len(part) for part in heard] == [16_000, 8_000]
    error = np.abs(np.concatenate(heard) - sound).max()
    assert error <= (1 / 65_536 + 1e-6 if uplink == "int16" else 0)


@pytest.mark.parametrize(
    ("error", "kind", "can_retry"),
    [
        (error_of_close(1013, ""), BusyError, True),
        (error_of_close(1011, ""), ServerError, True),
        (error_of_close(1001, ""), ServerError, True),
        (error_of_close(1006, ""), ConnectionLostError, True),
        (error_of_close(1008, ""), RefusedError, False),
        (error_of_close(1009, ""), RefusedError, False),
        (error_of_status(503, "7"), BusyError, True),
        (error_of_status(503, "900"), BusyError, True),
        (error_of_status(500, None), ServerError, True),
        (error_of_status(404, None), RefusedError, False),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value).replace(" ", "_"),
)
def test_type_of_an_error_says_whether_to_try_again(
    error: DuplexError, kind: type[DuplexError], can_retry: bool
) -> None:
    assert type(error) is kind
    assert error.can_retry is can_retry
    waits = [retry_wait_s(error, attempt) for attempt in range(12)]
    if not can_retry or error.retry_after_s == 900:
        assert waits == [None] * 12
        return
    least = error.retry_after_s or 0
    assert all(wait is not None and least <= wait <= 30 for wait in waits)
    assert waits[-1] is not None
    assert waits[-1] >= 15
