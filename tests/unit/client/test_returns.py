"""Resumable sessions: returns after a loss, at the server's wish, and from the queue."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import wave
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fabric.fault_proxy import FaultProxy
from support.protocols.client_server import begin, end, served, tell, told
from support.time_limits import WITHIN_S, until
from websockets.asyncio.server import ServerConnection

from duplane.client import ConnectionLostError, DuplexSession, Return, encode
from duplane.client.events import INPUT_RATE, Dialect
from duplane.client.resuming import KEPT_S, Input, SentInput, return_wait_s
from duplane.client.sound import Uplink

RESUME = {"token": "s.secret", "within_s": 60}
WAIT = {"type": "session.queued", "position": 2, "queue_length": 3, "estimated_wait_s": 1}
MS = 16  # samples


def unit(number: int, part: int = 0, **fields: object) -> dict[str, object]:
    event = {"type": "response.output.delta", "kind": "text", "text": f"{number}.{part} "}
    return {**event, "unit": number, "part": part, "next_sample": 0, **fields}


async def open_session(socket: ServerConnection) -> dict[str, Any]:
    """Begin a resumable session, whose client sends its settings at once."""
    settings = await told(socket)
    await tell(socket, type="session.queue_done")
    await tell(socket, type="session.created", session_id="s", usage={}, resume=RESUME)
    return settings


async def resume(
    socket: ServerConnection, next_sample: int = 0, lost_samples: int = 0
) -> dict[str, Any]:
    """Answer a client that returns; return what it asked."""
    await tell(socket, **WAIT)
    asked = await told(socket)
    assert asked["type"] == "session.resume"
    counts = {"next_sample": next_sample, "lost_samples": lost_samples}
    await tell(socket, type="session.resumed", unit=9, gap_s=0.5, **counts)
    return asked


def session_at(url: str, **settings: Any) -> DuplexSession:
    return DuplexSession(url, **{"resumable": True, "return_wait": lambda _: 0.0, **settings})


def scripted(*steps: Callable[[ServerConnection], Any]) -> Callable[[ServerConnection], Any]:
    """Give each connection to the next step."""
    numbers = itertools.count()

    async def serve(socket: ServerConnection) -> None:
        await steps[next(numbers)](socket)

    return serve


async def reset(socket: ServerConnection) -> None:
    socket.transport.abort()
    await socket.wait_closed()


@given(st.data())
def test_server_gets_every_sample_that_is_kept(data: st.DataObject) -> None:
    """A server that lost any part of the input has all of it in order after a return."""
    uplinks: tuple[Uplink, ...] = ("int16", "float32")
    uplink = data.draw(st.sampled_from(uplinks))
    kept = SentInput()
    total, received = 0, array("h")
    for _ in range(data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(0, 3))):
            count = data.draw(st.integers(0, 5))
            levels = array("h", range(total, total + count))
            total += count
            sound = encode(levels, uplink=uplink)
            for piece in sound.pieces:
                kept.add(piece)
        for _ in range(data.draw(st.integers(0, 4))):
            if one := kept.take():
                assert one.first == len(received)
                received += levels_of(one)
        if data.draw(st.booleans()):
            next_sample = data.draw(st.integers(0, len(received)))
            del received[next_sample:]
            assert kept.rewind(next_sample) == 0
    while one := kept.take():
        received += levels_of(one)
    assert received == array("h", range(total))


def levels_of(one: Input) -> array[int]:
    content = base64.b64decode(one.audio)
    if content.startswith(b"RIFF"):
        with wave.open(io.BytesIO(content)) as sound:
            return array("h", sound.readframes(sound.getnframes()))
    return array("h", (round(level * 32768) for level in array("f", content)))


def test_old_input_is_dropped_and_counted_as_lost() -> None:
    kept = SentInput()
    second = encode(bytes(2 * INPUT_RATE)).pieces[0]
    for _ in range(round(KEPT_S) + 2):
        kept.add(second)
    assert kept.first_sample == 2 * INPUT_RATE
    assert kept.rewind(2 * INPUT_RATE) == 2 * INPUT_RATE  # the server was told the first sample
    assert kept.rewind(INPUT_RATE // 2) == 3 * INPUT_RATE // 2  # it was not
    kept.is_asked = True  # the server was told the first sample
    kept.add(second)
    assert kept.first_sample == 2 * INPUT_RATE


def test_client_that_catches_up_waits_for_the_server() -> None:
    """A server keeps four seconds that wait, and drops older ones."""
    kept = SentInput()
    second = encode(bytes(2 * INPUT_RATE)).pieces[0]
    for _ in range(8):
        kept.add(second)
    kept.rewind(INPUT_RATE)

    def taken() -> int:
        return sum(1 for _ in iter(kept.take, None))

    assert taken() == 2
    assert kept.begun({"next_sample": 2 * INPUT_RATE})
    assert taken() == 1
    assert kept.begun({"next_sample": 8 * INPUT_RATE})
    assert taken() == 4
    assert not kept.begun({"next_sample": 8 * INPUT_RATE})  # it has caught up
    for _ in range(8):
        kept.add(second)
    assert taken() == 8


@pytest.mark.parametrize("attempt", range(8))
def test_wait_before_an_attempt_is_a_quarter_of_a_second_to_four(attempt: int) -> None:
    assert 0.25 <= return_wait_s(attempt) <= 4.0


@pytest.mark.parametrize("dialect", ["A", "B"])
async def test_session_returns_and_every_event_comes_once(dialect: Dialect) -> None:
    seen: list[dict[str, Any]] = []

    async def first(socket: ServerConnection) -> None:
        seen.append(await open_session(socket))
        await tell(socket, **unit(0))
        await tell(socket, **unit(0, 1))
        await reset(socket)

    async def second(socket: ServerConnection) -> None:
        seen.append(await resume(socket, lost_samples=70))
        await tell(socket, **unit(0, 1, replayed=True))
        await tell(socket, **unit(1, replayed=True))
        await tell(socket, **unit(2))
        await end(socket)

    returns: list[Return] = []
    losses: list[int] = []
    told_events: list[Any] = []
    async with served(scripted(first, second)) as server:
        session = session_at(
            server.url,
            dialect=dialect,
            on_lost=lambda: losses.append(len(returns)),
            on_return=returns.append,
            on_event=told_events.append,
        )
        async with session:
            outputs = [await anext(session) for _ in range(4)]
    assert [(one.unit, one.part) for one in outputs] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert [one.replayed for one in outputs] == [False, False, True, False]
    settings, asked = seen
    assert settings["session" if dialect == "A" else "payload"]["resumable"] is True
    assert asked["token"] == "s.secret"
    assert (asked["unit"], asked["part"], asked["from_sample"]) == (0, 1, 0)
    assert [(one.gap_s, one.attempts, one.lost_samples) for one in returns] == [(0.5, 1, 70)]
    assert losses == [0]  # before the return
    assert "secret" not in repr((session.created, told_events))


async def test_input_is_sent_again_from_the_sample_that_the_server_lacks() -> None:
    lengths: list[int] = []

    async def first(socket: ServerConnection) -> None:
        await open_session(socket)
        for _ in range(2):
            await told(socket)
        await reset(socket)

    async def second(socket: ServerConnection) -> None:
        asked = await resume(socket, next_sample=30 * MS)
        assert "unit" not in asked  # no event had come
        for number in range(3):
            lengths.append(len((await told(socket))["input"]["audio"]))
            await tell(socket, **unit(number))
        await end(socket)

    async with (
        served(scripted(first, second)) as server,
        session_at(server.url, uplink="float32") as session,
    ):
        for _ in range(2):
            await session.send(bytes(2 * 20 * MS))
        reading = asyncio.create_task(anext(session))
        await session.send(bytes(2 * 20 * MS))  # perhaps while there is no connection
        await reading
        await anext(session)
        await session.send(bytes(2 * 5 * MS))
        await anext(session)
    # 10 ms of the second append, then the others.
    assert lengths == [base64_length(4 * ms * MS) for ms in (10, 20, 5)]


def base64_length(byte_count: int) -> int:
    return 4 * -(-byte_count // 3)


@pytest.mark.parametrize(
    "code", ["resume_refused", "resume_expired", "resume_lost", "resume_stale"]
)
async def test_refused_return_ends_the_session_at_once(code: str) -> None:
    async def first(socket: ServerConnection) -> None:
        await open_session(socket)
        await reset(socket)

    async def second(socket: ServerConnection) -> None:
        await told(socket)
        await tell(socket, type="error", error={"code": code, "message": "no"})
        await socket.close(1008)

    async with served(scripted(first, second)) as server, session_at(server.url) as session:
        with pytest.raises(ConnectionLostError, match="no") as refused:
            await anext(session)
        assert refused.value.code == code
        assert len(server.paths) == 2


async def test_busy_server_costs_no_attempt_and_others_cost_five() -> None:
    async def first(socket: ServerConnection) -> None:
        await open_session(socket)
        await reset(socket)

    async def busy(socket: ServerConnection) -> None:
        await told(socket)
        await tell(socket, type="error", error={"code": "resume_busy", "message": "wait"})
        await socket.close(1013)

    steps = [first, busy, *[reset] * 4, busy, reset]
    losses: list[str] = []
    async with (
        served(scripted(*steps)) as server,
        session_at(server.url, on_lost=lambda: losses.append("lost")) as session,
    ):
        with pytest.raises(ConnectionLostError):
            await anext(session)
        assert len(server.paths) == len(steps)
    assert losses == ["lost"]  # not once for each attempt


async def test_server_that_shuts_down_is_left_before_its_connection_ends() -> None:
    order: list[str] = []

    async def first(socket: ServerConnection) -> None:
        await open_session(socket)
        await tell(socket, type="session.go_away", within_s=600, after_s=0)
        await socket.wait_closed()
        order.append("first is closed")

    async def second(socket: ServerConnection) -> None:
        await resume(socket)
        order.append("second is open")
        await tell(socket, **unit(0))
        await end(socket)

    losses: list[str] = []
    returns: list[Return] = []
    async with (
        served(scripted(first, second)) as server,
        session_at(
            server.url, on_lost=lambda: losses.append("lost"), on_return=returns.append
        ) as session,
    ):
        assert (await anext(session)).unit == 0
    assert losses == []
    assert sorted(order) == ["first is closed", "second is open"]
    assert [one.was_asked for one in returns] == [True]


async def test_session_that_another_connection_has_taken_ends() -> None:
    async def first(socket: ServerConnection) -> None:
        await open_session(socket)
        await tell(socket, type="session.replaced")
        await socket.close(1000)

    async with served(scripted(first)) as server, session_at(server.url) as session:
        assert [one async for one in session] == []
        assert session.end
        assert session.end.reason == "replaced"


@pytest.mark.parametrize("is_asked", [False, True])
async def test_waiting_client_shows_its_place_at_the_next_server(*, is_asked: bool) -> None:
    settings: list[dict[str, Any]] = []

    async def first(socket: ServerConnection) -> None:
        settings.append(await told(socket))
        await tell(socket, **WAIT, queue_token="sealed")
        if is_asked:
            await tell(socket, type="session.go_away", within_s=30, after_s=0.01)
            await socket.wait_closed()
        else:
            await reset(socket)

    async def second(socket: ServerConnection) -> None:
        settings.append(await open_session(socket))
        await end(socket)

    async with (
        served(scripted(first, second)) as server,
        session_at(server.url, retry_base_s=0.0),
    ):
        pass
    assert [one["payload"].get("queue_token") for one in settings] == [None, "sealed"]


async def test_server_without_returns_is_used_as_before() -> None:
    async def first(socket: ServerConnection) -> None:
        await begin(socket)
        await reset(socket)

    async with served(scripted(first)) as server, session_at(server.url) as session:
        with pytest.raises(ConnectionLostError):
            await anext(session)
        assert len(server.paths) == 1


async def test_connection_without_a_word_counts_as_lost() -> None:
    """No end of the connection arrives, as after a change of networks."""
    silent = asyncio.Event()

    async def first(socket: ServerConnection) -> None:
        await open_session(socket)
        await tell(socket, **unit(0))
        await silent.wait()

    async def second(socket: ServerConnection) -> None:
        await resume(socket)
        silent.set()
        await tell(socket, **unit(1))
        await end(socket)

    async def has_returned() -> bool:
        return proxy.accepted_count > 1

    # A loaded machine may be silent, too; then there are more returns.
    steps = [first, *[second] * 30]
    async with served(scripted(*steps)) as server, FaultProxy(server.url[5:]) as proxy:
        session = session_at(f"ws://{proxy.address}", silence_s=0.5)
        async with session:
            assert (await anext(session)).unit == 0
            proxy.hold()
            reading = asyncio.create_task(anext(session))
            await until(has_returned, WITHIN_S)
            proxy.let_go()
            assert (await reading).unit == 1


async def test_closing_ends_a_return() -> None:
    has_gone = asyncio.Event()

    async def first(socket: ServerConnection) -> None:
        await open_session(socket)
        await reset(socket)
        has_gone.set()

    async with served(scripted(first)) as server:
        session = await session_at(server.url, return_wait=lambda _: 3600.0).connect()
        reading = asyncio.create_task(anext(session, None))
        await has_gone.wait()
        await session.close()
        assert await reading is None
        assert session.end
