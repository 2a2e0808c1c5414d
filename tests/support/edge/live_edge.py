"""A real edge in the test's process, connected to a scripted fabric."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
import pybase64
from support.edge.raw_client import RawClient, event
from support.edge.scripted_fabric import ScriptedConversation, ScriptedFabric
from support.fabric.in_process import no_task_left, running_edge
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import ClientConnection, connect

from duplane.edge.clock import Clock, Moment
from duplane.edge.server import Edge
from duplane.edge.settings import Limits
from duplane.fabric.monitoring.spans import Telemetry


class SetAlarm:
    """A callback that a HandSetClock calls when it is due."""

    def __init__(self, due_s: float, callback: Callable[[], None]) -> None:
        self.due_s = due_s
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class HandSetClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self._now = Moment(36_077.123, 1_714_200_000_000_000_000)
        self._alarms: list[SetAlarm] = []

    def now(self) -> Moment:
        return self._now

    def call_at(self, monotonic_s: float, callback: Callable[[], None]) -> SetAlarm:
        self._alarms.append(SetAlarm(monotonic_s, callback))
        return self._alarms[-1]

    def advance(self, seconds: float) -> None:
        now = self._now
        self._now = Moment(now.monotonic_s + seconds, now.wall_ns + int(seconds * 1e9))
        due = [alarm for alarm in self._alarms if alarm.due_s <= self._now.monotonic_s]
        self._alarms = [alarm for alarm in self._alarms if alarm not in due]
        for alarm in due:
            if alarm.callback:
                alarm.callback()


class Asked:
    """Sends HTTP requests to an edge."""

    def __init__(self, address: str, client: aiohttp.ClientSession) -> None:
        self.address = address
        self.client = client

    async def ask(self, method: str, path: str, **request: Any) -> tuple[int, Any]:
        """Send a request; `data` of bytes, text or pieces of bytes counts as JSON."""
        url = f"http://{self.address}{path}"
        if isinstance(request.get("data"), bytes | str | AsyncIterator):
            request["headers"] = {"Content-Type": "application/json", **request.get("headers", {})}
        async with self.client.request(method, url, **request) as response:
            assert response.headers["Connection"] == "close"
            assert "Server" not in response.headers
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        code, body = await self.ask("GET", path)
        assert code == 200, body
        return body


class LiveEdge:
    """One edge and its fabric."""

    def __init__(self, edge: Edge, fabric: ScriptedFabric, clock: Clock | None) -> None:
        self.clock = clock
        self.edge = edge
        self.fabric = fabric
        self._draining: asyncio.Task[None] | None = None

    def url(self, query: str = "?mode=audio") -> str:
        return f"ws://{self.edge.address}/v1/realtime{query}"

    def connect(self, query: str = "?mode=audio") -> connect:
        return connect(self.url(query), compression=None, max_size=None, proxy=None)

    def connect_to(self, path: str) -> connect:
        url = f"ws://{self.edge.address}{quote(path, safe='/?=&')}"
        return connect(url, compression=None, max_size=None, proxy=None)

    @contextlib.asynccontextmanager
    async def asked(self) -> AsyncGenerator[Asked]:
        """Yield an HTTP client of this edge."""
        async with aiohttp.ClientSession() as client:
            yield Asked(self.edge.address, client)

    def drain(self) -> None:
        self._draining = asyncio.ensure_future(self.edge.drain())

    async def get(self, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
        return await asyncio.to_thread(self._get, path, method)

    def _get(self, path: str, method: str) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(f"http://{self.edge.address}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=WITHIN_S) as response:
                return response.status, orjson.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, orjson.loads(error.read())

    async def until_session_count(self, count: int) -> None:
        """Wait until the edge has exactly `count` sessions."""
        async with asyncio.timeout(WITHIN_S):
            while (await self.get("/status"))[1]["edge_session_count"] != count:
                pass

    async def until_running(self, dialect: str) -> None:
        """Wait until a session of this dialect has its slot."""
        labels = {"role": "edge", "dialect": dialect, "state": "running"}

        async def is_running() -> bool:
            return bool(self.edge.metrics.registry.get_sample_value("duplane_sessions", labels))

        await until(is_running, WITHIN_S)

    async def settled(self) -> None:
        """Wait until the edge has no session and the fabric holds no slot or stream."""
        if self._draining:
            await self._draining
        async with asyncio.timeout(WITHIN_S):
            await self.edge.idle()
        await self.fabric.settled()


@contextlib.asynccontextmanager
async def live_edge(
    limits: Limits | None = None,
    *,
    slot_count: int = 1,
    telemetry: Telemetry | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncGenerator[LiveEdge]:
    """Run an edge with these limits and settings; at the end, assert that no task is left."""
    with no_task_left("duplane/edge/"):
        async with (
            ScriptedFabric.running(slot_count) as fabric,
            running_edge(
                fabric.scheduler,
                limits=limits or Limits(),
                telemetry=telemetry,
                clock=clock,
                **settings,
            ) as edge,
        ):
            live = LiveEdge(edge, fabric, clock)
            yield live
            await live.settled()


def impatient(limits: Limits) -> Limits:
    """Return the limits with a very short drain and a very short wait for clients to close."""
    return replace(limits, drain_s=0.05, close_s=0.1)


# --- a client of dialect A, step by step ---

AUDIO = pybase64.b64encode(pcm(16_000)).decode()
UPDATE = {"type": "session.update", "session": {"instructions": "Be brief."}}
APPEND = {"type": "input_audio_buffer.append", "audio": AUDIO}
CLOSE = {"type": "session.close", "reason": "user_stop"}


async def send(client: ClientConnection, event: object) -> None:
    await client.send(orjson.dumps(event), text=True)


async def receive(client: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(WITHIN_S):
        return orjson.loads(await client.recv())


async def begin(client: ClientConnection) -> None:
    assert (await receive(client))["type"] == "session.queue_done"
    await send(client, UPDATE)
    assert (await receive(client))["type"] == "session.created"


async def exchange(client: ClientConnection) -> dict[str, Any]:
    await send(client, APPEND)
    answer = await receive(client)
    assert answer["type"] == "response.listen", answer
    return answer


async def end(client: ClientConnection) -> None:
    await send(client, CLOSE)
    assert await receive(client) == {"type": "session.closed", "reason": "stopped"}
    await closed(client, 1000)


async def closed(client: ClientConnection, code: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        await client.wait_closed()
    assert client.close_code == code


# --- raw clients, and a well-behaved client beside them ---

QUICK = replace(Limits(), client_s=0.5, close_s=0.2)
AUDIO_PATH = "/v1/realtime?mode=audio"


async def begin_raw(edge: LiveEdge, client: RawClient) -> ScriptedConversation:
    """Begin a session of dialect A and read until `session.created`."""
    await client.upgrade(AUDIO_PATH)
    await client.send(event(UPDATE))
    await client.read_until(b"session.created")
    return await edge.fabric.conversation()


async def ended(conversation: ScriptedConversation) -> None:
    """Wait until a session's call to the worker has ended."""
    async with asyncio.timeout(WITHIN_S):
        await conversation.is_over.wait()


async def drip(client: RawClient, step: int) -> None:
    """Read slowly, `step` bytes at a time. A `step` of 0 reads nothing and never returns."""
    while True:
        if step and not await client.read(step):
            return
        await asyncio.sleep(0.01)


async def is_welcome(edge: LiveEdge) -> bool:
    """Return whether the edge answers a request on a new connection."""
    async with RawClient(edge.edge.address) as client:
        with contextlib.suppress(OSError):
            await client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return await client.read_all() != b""


@contextlib.asynccontextmanager
async def witness_of(edge: LiveEdge) -> AsyncGenerator[ClientConnection]:
    """Run an ordinary session beside faulty ones; check that its units are answered in order."""
    async with edge.connect() as client:
        await begin(client)
        await edge.fabric.conversation()
        before = (await exchange(client))["kv_cache_length"]
        yield client
        after = [(await exchange(client))["kv_cache_length"] for _ in range(5)]
        assert after == list(range(after[0], after[0] + 5))
        assert after[0] > before
        await end(client)
