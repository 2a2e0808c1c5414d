"""Clients that misbehave, each kind in a different way. They run in a separate process.

`python -m duplane.tools.bench.bad_clients KIND COUNT HOST:PORT` connects COUNT clients of one kind,
prints `ready`, and runs until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pybase64

from duplane.tools.bench.raw_clients import CONTINUATION, PING, TEXT, RawClient, event, frame

_SESSION = "/v1/realtime?mode=audio"
_CHAT = "/v1/realtime?mode=chat"
_UNIT_S = 0.5  # twice as fast as speech
_NICENESS = 19  # lowest priority: the edge gets the CPU time that it needs
_NOISE = np.random.default_rng(0).normal(0, 0.1, 16_000).astype("<f4").tobytes()
_UNIT = event({"type": "input.append", "input": {"audio": pybase64.b64encode_as_string(_NOISE)}})
_INIT = event({"type": "session.init", "payload": {}})
_TURN = event(
    {
        "type": "input.append",
        "input": {
            "messages": [{"role": "user", "content": "Tell me a long story."}],
            "streaming": True,
            "generation": {"max_new_tokens": 2000},
        },
    }
)
_VALUES = frame(TEXT, b'{"type":"input.append","x":[' + b"{}," * 2_700_000 + b"{}]}")


async def _begun(client: RawClient, path: str = _SESSION) -> None:
    """Begin a session, and read events until units may be sent."""
    await client.upgrade(path)
    await client.send(_INIT)
    await client.read_until(b"session.created")


async def _repeat(client: RawClient, data: bytes, pause_s: float = 0.0) -> None:
    while True:
        await client.send(data)
        await asyncio.sleep(pause_s)


async def _drip(client: RawClient) -> None:
    while True:
        await client.read(1)
        await asyncio.sleep(1)


async def _speak(client: RawClient) -> None:
    """Behave well. This kind shows the cost of additional clients that behave well."""
    await _begun(client)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_repeat(client, _UNIT, _UNIT_S))
        tasks.create_task(client.read_all())


async def _never_read(client: RawClient) -> None:
    await _begun(client)
    await _repeat(client, _UNIT, _UNIT_S)


async def _read_slowly(client: RawClient) -> None:
    await _begun(client)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_repeat(client, _UNIT, _UNIT_S))
        tasks.create_task(_drip(client))


async def _vanish(client: RawClient) -> None:
    await _begun(client)


async def _send_no_first_message(client: RawClient) -> None:
    await client.upgrade(_SESSION)
    await client.read_all()


async def _stop_in_a_frame(client: RawClient) -> None:
    await _begun(client)
    await client.send(_UNIT[:50_000])
    await client.read_all()


async def _flood(client: RawClient, data: bytes, *, is_read: bool = True) -> None:
    await _begun(client)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_repeat(client, data))
        if is_read:
            tasks.create_task(client.read_all())


async def _never_read_chat(client: RawClient) -> None:
    await _begun(client, _CHAT)
    await _repeat(client, _TURN, 0.5)


async def _never_read_http(client: RawClient) -> None:
    await client.send(b"GET /api/default_ref_audio HTTP/1.1\r\nHost: e\r\n\r\n")


async def _send(client: RawClient, data: bytes) -> None:
    await client.send(data)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to misbehave. If `takes_slots`, each such client occupies a slot of the worker."""

    about: str
    act: Callable[[RawClient], Awaitable[None]]
    takes_slots: bool = True
    is_slow: bool = True  # the clients use the smallest receive window


KINDS: Mapping[str, Kind] = {
    "good": Kind("good sessions, to compare", _speak, is_slow=False),
    "unread": Kind("never reads", _never_read),
    "drip": Kind("reads a byte a second", _read_slowly),
    "vanished": Kind("begins, then neither reads nor sends", _vanish),
    "mute": Kind("never sends its first message", _send_no_first_message),
    "half-frame": Kind("stops in the middle of a frame", _stop_in_a_frame),
    "chat": Kind("never reads a chat", _never_read_chat),
    "fast": Kind("sends units as fast as it can", lambda c: _flood(c, _UNIT), is_slow=False),
    "pings": Kind("floods with pings", lambda c: _flood(c, frame(PING) * 5000), is_slow=False),
    "unread-pings": Kind(
        "floods with pings and never reads",
        lambda c: _flood(c, frame(PING, b"x" * 125) * 500, is_read=False),
    ),
    "crumbs": Kind(
        "floods with empty events",
        lambda c: _flood(c, frame(TEXT, b"{}") * 1000),
        is_slow=False,
    ),
    "fragments": Kind(
        "sends a message of endless fragments",
        lambda c: _flood(
            c,
            frame(TEXT, b"{", is_last=False) + frame(CONTINUATION, b" ", is_last=False) * 5000,
        ),
        is_slow=False,
    ),
    "values": Kind("sends 8 MB of {},{},{}", lambda c: _flood(c, _VALUES), is_slow=False),
    "silent": Kind("connects and says nothing", lambda c: _send(c, b""), takes_slots=False),
    "half-upgrade": Kind(
        "stops in the middle of the handshake",
        lambda c: _send(c, b"GET /v1/realtime HTTP/1.1\r\nUpgrade: websocket\r\n"),
        takes_slots=False,
    ),
    "half-request": Kind(
        "stops in the middle of an HTTP body",
        lambda c: _send(
            c, b"PUT /api/config/eta HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        ),
        takes_slots=False,
    ),
    "unread-http": Kind("never reads its HTTP answer", _never_read_http, takes_slots=False),
}


async def _misbehave(kind: Kind, count: int, address: str) -> None:
    os.nice(_NICENESS)
    async with contextlib.AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())

        async def act(client: RawClient) -> None:
            with contextlib.suppress(OSError, AssertionError, ExceptionGroup):
                await kind.act(client)

        for _ in range(count):
            client = await stack.enter_async_context(RawClient(address, is_slow=kind.is_slow))
            tasks.create_task(act(client))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)  # end abruptly, as a crash would; there is nothing to clean up


if __name__ == "__main__":
    asyncio.run(_misbehave(KINDS[sys.argv[1]], int(sys.argv[2]), sys.argv[3]))
