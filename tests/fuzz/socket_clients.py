"""Clients over sockets. Some send invalid data; others behave well and must get every reply."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from random import Random
from typing import Any

import orjson
from fuzz import wire
from fuzz.cases import Case
from fuzz.continuation import LEAVE, SETTINGS, UNIT
from fuzz.event_rules import CLOSINGS, QUEUE_EVENTS, IllegalError, check_event
from fuzz.random_fabric import WITNESS
from fuzz.values import render
from support.edge.live_edge import LiveEdge
from support.edge.raw_client import CLOSE, PING, PONG, TEXT, RawClient
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

CLOSE_CODES = frozenset({1000, 1001, 1002, 1003, 1007, 1008, 1009, 1011, 1013})
_HTTP_CODES = frozenset({100, 101, *range(200, 207), *range(400, 432), 501, 503, 505})
_WITNESS_PACE_S = 0.02
_LINES = 40  # number of lines of each case that are sent; pure sessions run all lines
WITHIN_S = 60.0  # far longer than any step takes


class Listener:
    """Checks that the edge's messages on one connection follow the rules of the dialect."""

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect  # changes from "A" to "B" when an event of B arrives
        self.answers: Counter[str] = Counter()
        self.sent_count = 0
        self._is_over = False
        self._news = asyncio.Event()

    @classmethod
    def at(cls, path: str) -> Listener:
        if path.startswith("/ws/chat"):
            return cls("D")
        if path.startswith("/ws/duplex/"):
            return cls("C")
        if path.startswith("/ws/half_duplex/"):
            return cls("H")
        if "/live/sessions" in path:
            return cls("L")
        if path.startswith("/openai/v1/realtime"):
            return cls("E")
        return cls("B chat" if "mode=chat" in path and "mode=video" not in path else "A")

    def hear(self, message: str | bytes) -> Any:
        event = orjson.loads(message)
        if self.dialect in ("A", "B") and event["type"] not in QUEUE_EVENTS:
            # The edge refuses an invalid first event in the event's own dialect, but the session's
            # dialect stays open.
            self.dialect = "B" if "server_send_ts" in event else "A"
        if self._is_over:
            raise IllegalError(f"said after the closing event: {event}")
        check_event(self.dialect, event)
        self.answers[event["type"]] += 1
        self._is_over = event["type"] in CLOSINGS[self.dialect]
        self._news.set()
        return event

    async def wait_a_little(self, seconds: float) -> None:
        """Wait for the next event for at most `seconds`."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()


async def act(edge: LiveEdge, case: Case, rng: Random) -> Listener:
    """Send the client messages of a case in order, then leave in a random way."""
    listener = Listener.at(case.path)
    async with asyncio.timeout(WITHIN_S), edge.connect_to(case.path) as client:
        listening = asyncio.create_task(_listen(client, listener))
        try:
            is_there = await _say_all(client, case, listener, rng)
            if is_there and rng.random() < 0.6:
                await _carry_on(client, listener, rng)
            has_closed = is_there and await _leave(client, listener.dialect, rng)
            await listening
        finally:
            listening.cancel()
    if is_there and not has_closed and client.close_code not in CLOSE_CODES:
        raise IllegalError(f"closed with {client.close_code}")
    return listener


async def _listen(client: ClientConnection, listener: Listener) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            listener.hear(await client.recv())


async def _say_all(client: ClientConnection, case: Case, listener: Listener, rng: Random) -> bool:
    """Send the lines of a case. Return False if the client left before the last line."""
    is_patient = rng.random() < 0.7
    if is_patient and listener.dialect != "D":
        await listener.wait_a_little(1.0)
    for line in case.lines[:_LINES]:
        with contextlib.suppress(ConnectionClosed):
            if line.message is not None:
                await client.send(line.message.render(), text=True)
                listener.sent_count += 1
            elif line.who == "binary":
                await client.send(b"\0\1")
            elif line.who == "leaves":
                client.transport.abort()
                return False
        is_good = line.message is not None and not line.message.is_mutated
        if is_patient and is_good and client.state is State.OPEN:
            await listener.wait_a_little(0.3)
    return True


async def _carry_on(client: ClientConnection, listener: Listener, rng: Random) -> None:
    """After the messages of the case, send valid messages."""
    good = [SETTINGS.get(listener.dialect), *[UNIT[listener.dialect]] * rng.randint(1, 5)]
    with contextlib.suppress(ConnectionClosed):
        for value in filter(None, good):
            await client.send(render(value), text=True)
            listener.sent_count += 1
            if client.state is State.OPEN:
                await listener.wait_a_little(0.2)


async def _leave(client: ClientConnection, dialect: str, rng: Random) -> bool:
    """Close the connection and return True, or end the session by an event and return False."""
    with contextlib.suppress(ConnectionClosed):
        if dialect not in LEAVE or rng.random() < 0.3:
            await client.close(rng.choice([1000, 1001, 3000]), "x" * rng.choice((0, 123)))
            return True
        await client.send(render(LEAVE[dialect]), text=True)
    await client.wait_closed()
    return False


# --- raw bytes ---


async def attack(edge: LiveEdge, rng: Random) -> tuple[str, int]:
    """Send invalid WebSocket frames or invalid HTTP. Return the kind and the number of pieces."""
    kind = rng.choice(["frames", "handshake", "request"])
    path = rng.choice(["/v1/realtime?mode=audio", "/v1/realtime", "/ws/duplex/x", "/ws/chat"])
    greeting = b""
    if kind == "frames":
        pieces = [piece for _ in range(rng.choice((1, 1, 2))) for piece in _frames(rng)]
        greeting = wire.upgrade(rng, path, is_right=True)
    elif kind == "handshake":
        at = rng.choice([path, rng.choice(wire.PATHS)])
        pieces = [wire.upgrade(rng, at, is_right=False)]
    else:
        pieces = wire.request(rng)
    said = await _exchange(edge, greeting, pieces, rng, is_upgrade=kind != "request")
    _check_answer(kind, said, Listener.at(path), pieces)
    return kind, len(pieces)


def _frames(rng: Random) -> wire.Pieces:
    return rng.choice(wire.FRAMES)(rng)


async def _exchange(
    edge: LiveEdge, greeting: bytes, pieces: wire.Pieces, rng: Random, *, is_upgrade: bool
) -> bytes:
    """Send the greeting, if there is one, and the pieces; return the reply to the pieces."""
    heard = bytearray()
    async with asyncio.timeout(WITHIN_S), RawClient(edge.edge.address, is_slow=False) as client:
        if greeting:
            await client.send(greeting)
            await client.read_head()
        hearing = asyncio.create_task(_hear(client, heard))
        try:
            if await _send_all(client, pieces, hearing, rng, is_upgrade=is_upgrade):
                await hearing
        finally:
            hearing.cancel()
            await asyncio.wait({hearing})
    return bytes(heard)


async def _hear(client: RawClient, heard: bytearray) -> None:
    while piece := await client.read():
        heard += piece


async def _send_all(
    client: RawClient,
    pieces: wire.Pieces,
    hearing: asyncio.Task[None],
    rng: Random,
    *,
    is_upgrade: bool,
) -> bool:
    """Send the pieces; return False if the client then leaves without a wait for the end."""
    with contextlib.suppress(OSError):  # the edge has closed already
        for piece in pieces:
            await client.send(piece)
            await asyncio.sleep(0)
        await asyncio.wait({hearing}, timeout=rng.choice((0, 0.02, 0.1)))
        if rng.random() < 0.2:
            return False
        # Without an end of file, the edge must end the connection by a time limit.
        if is_upgrade or rng.random() < 0.9:
            client.send_eof()
    return True


def _check_answer(kind: str, said: bytes, listener: Listener, pieces: wire.Pieces) -> None:
    """Check that the answer is a legal HTTP response or legal frames."""
    shown = f"{[piece[:300] for piece in pieces[:3]]} is answered by {said[:300]!r}"
    if kind == "frames":
        _check_frames(said, listener, shown)
    elif said:
        words = said.partition(b"\r\n")[0].split(b" ")
        if not words[0].startswith(b"HTTP/") or int(words[1]) not in _HTTP_CODES:
            raise IllegalError(shown)


def _check_frames(said: bytes, listener: Listener, shown: str) -> None:
    for opcode, payload in _read_frames(said):
        if opcode == TEXT:
            listener.hear(payload)
        elif opcode == CLOSE and not _is_close_code(int.from_bytes(payload[:2])):
            raise IllegalError(shown)
        elif opcode not in (CLOSE, PING, PONG):
            raise IllegalError(f"opcode {opcode}: {shown}")


def _is_close_code(code: int) -> bool:
    return code in CLOSE_CODES or 3000 <= code < 5000  # the edge echoes a client's code


def _read_frames(data: bytes) -> list[tuple[int, bytes]]:
    """Return all complete frames of a server. An incomplete last frame is ignored."""
    frames: list[tuple[int, bytes]] = []
    while len(data) >= 2:
        opcode = data[0] & 15
        length = data[1]
        at = 2
        if length >= 126:
            size = 2 if length == 126 else 8
            at += size
            length = int.from_bytes(data[2:at])
        if len(data) < at + length:
            break
        frames.append((opcode, data[at : at + length]))
        data = data[at + length :]
    return frames


# --- witnesses ---


async def check_well_behaved(edge: LiveEdge, dialect: str, until: asyncio.Event) -> int:
    """Converse until `until` is set. Check each answer; return the number of answers."""
    path = {
        "A": f"/v1/realtime?mode=audio&client_id={WITNESS}",
        "B chat": f"/v1/realtime?mode=chat&client_id={WITNESS}",
        "C": f"/ws/duplex/adx_1?client_id={WITNESS}",
    }[dialect]
    count = 0
    async with edge.connect_to(path) as client:

        async def heard(kind: str) -> Any:
            async with asyncio.timeout(WITHIN_S):
                event = listener.hear(await client.recv())
            if event["type"] != kind:
                raise IllegalError(f"a well-behaved client gets {event} in place of {kind}")
            return event

        listener = Listener(dialect)
        await heard("queue_done" if dialect == "C" else "session.queue_done")
        await client.send(render(SETTINGS[dialect]), text=True)
        await heard("prepared" if dialect == "C" else "session.created")
        while not until.is_set():
            await client.send(render(UNIT[dialect]), text=True)
            if dialect == "B chat":
                told = [await heard("response.output.delta") for _ in range(2)]
                told.append(await heard("response.done"))
                is_right = [event["text"] for event in told] == ["Hello", " there.", "Hello there."]
            else:
                answer = await heard("result" if dialect == "C" else "response.listen")
                is_right = answer["kv_cache_length"] == 100 + count
            if not is_right:
                raise IllegalError(f"a well-behaved client missed a reply after {count}")
            count += 1
            await asyncio.sleep(_WITNESS_PACE_S)
        await client.send(render(LEAVE[dialect]), text=True)
        await heard("stopped" if dialect == "C" else "session.closed")
        await client.wait_closed()
    if client.close_code != 1000:
        raise IllegalError(f"a well-behaved client is closed with {client.close_code}")
    return count
