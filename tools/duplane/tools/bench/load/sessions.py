"""Sessions of clients: over WebSocket in a public dialect, or over gRPC without an edge."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import pybase64
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.fabric.audio import INPUT_RATE_HERTZ, pcm_from_samples
from duplane.fabric.client import FabricClient
from duplane.fabric.converse import ConverseStream
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.tools.bench.load.ledger import Answer
from duplane.tools.bench.load.plan import UNIT_S, Plan
from duplane.tools.command import CommandError
from duplane.tools.talk.client import begin, connected, end, full_url
from duplane.tools.talk.dialects import DIALECTS, TalkDialect

_PROMPT = "You are a helpful assistant."


def _second_of_sound() -> bytes:
    """Return noise: like speech, it can hardly be compressed, and the scripted model answers it."""
    noise = np.random.default_rng(0).normal(0, 0.1, int(INPUT_RATE_HERTZ * UNIT_S))
    noise[0] = 0.0  # the scripted model reads other values at this place as marks
    return pcm_from_samples(noise.astype(np.float32))


SOUND = _second_of_sound()
"""The sound of each unit, as PCM."""
_SOUND_BASE64 = pybase64.b64encode_as_string(SOUND)


class SessionError(Exception):
    """A session could not be opened, or has ended by itself."""


class LoadSession(Protocol):
    """One open session."""

    async def send(self, number: int) -> None:
        """Send the unit `number`, counted from 0. Raises SessionError."""
        ...

    def answers(self) -> AsyncIterator[tuple[float, Answer]]:
        """Yield the answers with their monotonic times of arrival, until the end of the session.

        Raises SessionError if the session ends before `close`.
        """
        ...

    async def close(self) -> None:
        """Request the end of the session; then `answers` ends."""
        ...


Opened = AbstractAsyncContextManager[LoadSession]


class WebSocketSession:
    """A session of a public dialect."""

    def __init__(self, connection: ClientConnection, dialect: TalkDialect, name: str) -> None:
        self._connection = connection
        self._dialect = dialect
        self._name = name
        self._is_closing = False
        self._message = b""  # of each unit; empty if it is not known, or differs

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, plan: Plan) -> AsyncGenerator[LoadSession]:
        """Open a session; its connection closes at the end of the `with`. Raises SessionError."""
        dialect = DIALECTS[plan.dialect](_PROMPT, None)
        ca = Path(plan.ca) if plan.ca else None
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(plan.open_timeout_s):
                    connection = await stack.enter_async_context(
                        connected(full_url(plan.url, dialect.path("audio")), ca)
                    )
                    await begin(connection, dialect)
            except (CommandError, ConnectionClosed) as error:
                raise SessionError(str(error)) from None
            except TimeoutError:
                raise SessionError(
                    f"the session did not open in {plan.open_timeout_s:g} s"
                ) from None
            yield cls(connection, dialect, plan.dialect)

    async def send(self, number: int) -> None:
        message = self._message or orjson.dumps(self._dialect.unit(number, _SOUND_BASE64, []))
        if self._name in ("E", "L"):
            self._message = message  # so that the generator resamples no other unit
        try:
            await self._connection.send(message, text=True)
        except ConnectionClosed as error:
            raise SessionError(f"the connection ended: {error}") from None

    async def answers(self) -> AsyncIterator[tuple[float, Answer]]:
        try:
            async for message in self._connection:
                arrived_s = time.monotonic()
                event = orjson.loads(message)
                if event.get("type") in self._dialect.ended:
                    if self._is_closing:
                        return
                    reason = event.get("reason") or event["type"]
                    raise SessionError(f"the server ended the session: {reason}")
                for answer in self._read(event):
                    yield arrived_s, answer
        except ConnectionClosed as error:
            raise SessionError(f"the connection ended: {error}") from None
        if not self._is_closing:
            raise SessionError("the server closed the connection")

    def _read(self, event: dict[str, Any]) -> list[Answer]:
        if event.get("type") == "error":
            named = str(event.get("input_id", ""))
            unit = int(named) if named.isdecimal() else None
            return [Answer(unit=unit, failure=orjson.dumps(event.get("error")).decode())]
        replies = list(self._dialect.replies(event))
        if event.get("type") == "response.done":  # of E: it answers no unit, but ends a response
            return []
        if self._name == "C":  # C also answers dropped units; their answers have no worker time
            worker_ms = event.get("wall_clock_ms")
            return [Answer(worker_ms=worker_ms, is_dropped=not worker_ms) for _ in replies]
        measured = event.get("metrics", {})
        return [
            Answer(
                unit=reply.unit if self._name == "B" else None,  # A does not name the unit
                part=str(event.get("kind", "")),
                worker_ms=measured.get("wall_clock_ms"),
                dropped_count=measured.get("dropped_units", 0),
            )
            for reply in replies
        ]

    async def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(ConnectionClosed):
            await end(self._connection, self._dialect)


class GrpcSession:
    """A session on a worker, without an edge."""

    def __init__(self, stream: ConverseStream) -> None:
        self._stream = stream

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, client: FabricClient, timeout_s: float) -> AsyncGenerator[LoadSession]:
        """Acquire a slot and open a conversation for the body of the `with`.

        Raises SessionError.
        """
        kind = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
        wish = lease_pb2.AcquireLeaseRequest(request_id=str(uuid.uuid4()), kind=kind)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(timeout_s):
                    stream = await stack.enter_async_context(client.session(wish))
                    await stream.open(session_pb2.Open(system_prompt=_PROMPT))
            except FabricError as error:
                raise SessionError(str(error)) from None
            except TimeoutError:
                raise SessionError(f"the session did not open in {timeout_s:g} s") from None
            yield cls(stream)

    async def send(self, number: int) -> None:
        try:
            await self._stream.send(session_pb2.Unit(sequence=number, audio=SOUND))
        except FabricError as error:
            raise SessionError(str(error)) from None

    async def answers(self) -> AsyncIterator[tuple[float, Answer]]:
        try:
            async for response in self._stream.responses():
                arrived_s = time.monotonic()
                match response.WhichOneof("message"):
                    case "delta":
                        yield arrived_s, _answer(response.delta)
                    case "failed":
                        failed = response.failed
                        yield arrived_s, Answer(unit=failed.sequence, failure=failed.reason)
                    case "closed" if response.closed.reason != session_pb2.CLOSE_REASON_CLIENT:
                        reason = session_pb2.CloseReason.Name(response.closed.reason)
                        raise SessionError(f"the worker ended the session: {reason}")
                    case _:
                        pass
        except FabricError as error:
            raise SessionError(str(error)) from None

    async def close(self) -> None:
        with contextlib.suppress(FabricError):
            await self._stream.close()


def _answer(delta: session_pb2.Delta) -> Answer:
    return Answer(
        unit=delta.sequence,
        worker_ms=to_seconds(delta.stage_times.total) * 1e3,
        dropped_count=delta.dropped_unit_count,
    )
