"""Sessions of clients: over WebSocket in a public dialect, or over gRPC without an edge.

The client library speaks A and B. The work of this process is part of what is measured, so the
sound is encoded once.
"""

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

from duplane.client import DuplexError, DuplexSession, InputError, Output, encode
from duplane.fabric.audio import INPUT_RATE_HERTZ, pcm_from_samples
from duplane.fabric.client import FabricClient
from duplane.fabric.converse import ConverseStream
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.tools.bench.load.ledger import Answer
from duplane.tools.bench.load.plan import UNIT_S, Plan
from duplane.tools.command import CommandError
from duplane.tools.talk.client import (
    OPEN_TIMEOUT_S,
    begin,
    connected,
    end,
    full_url,
    tls_context,
)
from duplane.tools.talk.dialects import DIALECTS, TalkDialect
from duplane.tools.talk.sessions import refusal, unit_of

_PROMPT = "You are a helpful assistant."


def _second_of_sound() -> bytes:
    """Return noise: like speech, it can hardly be compressed, and the scripted model answers it."""
    noise = np.random.default_rng(0).normal(0, 0.1, int(INPUT_RATE_HERTZ * UNIT_S))
    noise[0] = 0.0  # the scripted model reads other values at this place as marks
    return pcm_from_samples(noise.astype(np.float32))


SOUND = _second_of_sound()
"""The sound of each unit, as PCM."""
_SOUND_BASE64 = pybase64.b64encode_as_string(SOUND)
ENCODED_SOUND = encode(memoryview(SOUND).cast("f"), uplink="float32")


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


class LibrarySession:
    """A session of A or B."""

    def __init__(self, session: DuplexSession, *, has_names: bool) -> None:
        self._session = session
        self._has_names = has_names  # A does not name the unit of an answer
        self._is_closing = False

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, plan: Plan) -> AsyncGenerator[LoadSession]:
        """Open a session; its connection closes at the end of the `with`. Raises SessionError."""
        url = full_url(plan.url, "/v1/realtime")
        try:
            session = DuplexSession(
                url,
                dialect="B" if plan.dialect == "B" else "A",
                instructions=_PROMPT,
                tls=tls_context(url, Path(plan.ca) if plan.ca else None),
                proxy=False,
                loads=orjson.loads,
                resumable=plan.is_resumable,
                attempts=1,
                connect_timeout_s=OPEN_TIMEOUT_S,
                queue_timeout_s=plan.open_timeout_s,
            )
            async with asyncio.timeout(plan.open_timeout_s):
                await session.connect()
        except DuplexError as error:
            raise SessionError(str(refusal(url, error))) from None
        except CommandError as error:
            raise SessionError(str(error)) from None
        except TimeoutError:
            raise SessionError(f"the session did not open in {plan.open_timeout_s:g} s") from None
        try:
            yield cls(session, has_names=plan.dialect == "B")
        finally:
            await session.close()

    async def send(self, number: int) -> None:
        input_id = str(number) if self._has_names else None
        if not await self._session.send(ENCODED_SOUND, input_id=input_id):
            raise SessionError("the connection ended")

    async def answers(self) -> AsyncIterator[tuple[float, Answer]]:
        while True:
            try:
                output = await anext(self._session, None)
            except InputError as error:
                named = error.input_id or ""
                unit = int(named) if named.isdecimal() else None
                yield time.monotonic(), Answer(unit=unit, failure=str(error))
                continue
            except DuplexError as error:
                raise SessionError(f"the session ended: {error}") from None
            if output is None:
                break
            yield output.received_s, self._answer(output)
        if not self._is_closing:
            reason = self._session.end.reason if self._session.end else "closed"
            raise SessionError(f"the server ended the session: {reason}")

    def _answer(self, output: Output) -> Answer:
        return Answer(
            unit=unit_of(output) if self._has_names else None,
            part="audio" if output.encoded_audio else "text" if output.speaks else "listen",
            worker_ms=output.metrics.get("wall_clock_ms"),
            dropped_count=output.dropped_units,
        )

    async def close(self) -> None:
        self._is_closing = True
        await self._session.close()


class WebSocketSession:
    """A session of C, E or L."""

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
        return [Answer() for _ in replies]

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
