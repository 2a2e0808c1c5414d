"""Conversations in units, in any dialect: A and B with the client library, C, E and L without.

They try once to connect, and use no proxy.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import orjson
import pybase64
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.client import (
    BusyError,
    ConnectionLostError,
    DuplexError,
    DuplexSession,
    InputError,
    Output,
    QueuePlace,
    Return,
    ServerError,
)
from duplane.fabric.audio import Samples, pcm_from_samples
from duplane.tools.command import UsageError
from duplane.tools.talk import client
from duplane.tools.talk.client import (
    TalkError,
    begin,
    connect_error,
    connected,
    error_text,
    events_of,
    full_url,
    read_key,
    tls_context,
)
from duplane.tools.talk.dialects import DIALECTS, TalkDialect, UnitReply

QUEUE_TIMEOUT_S = 3600.0


def _raise(message: str) -> None:
    raise TalkError(message)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The conversation that a caller wants.

    `on_error` gets the messages of inputs that the server refuses; by default they raise TalkError.
    """

    url: str
    dialect: str
    mode: Literal["audio", "video"] = "audio"
    prompt: str = "You are a helpful assistant."
    voice: Samples | None = None
    seed: int | None = None
    is_resumable: bool = False
    ca: Path | None = None
    key_file: Path | None = None
    on_queued: Callable[[QueuePlace], None] | None = None
    on_return: Callable[[Return], None] | None = None
    on_error: Callable[[str], None] = _raise


class TalkSession(Protocol):
    """One conversation that has begun."""

    answers_each_unit: bool
    """False if the server sends nothing while the model listens."""
    end: str | None
    """How the session ended, if it ended in order; None before `replies` is over."""

    async def send(self, number: int, unit: Samples, pictures: Sequence[bytes] = ()) -> None:
        """Send unit `number`, counted from 0. Does nothing if the session is over."""
        ...

    def replies(self) -> AsyncIterator[UnitReply]:
        """Yield the replies to the units until the session ends. Raises TalkError."""
        ...

    async def close(self) -> None:
        """End the session; `replies` then yields the last replies."""
        ...


def begun(wish: Wish) -> AbstractAsyncContextManager[TalkSession]:
    """Begin a conversation; its connection closes at the end of the `with`.

    Raises UsageError, ConnectError, and TalkError if the server refuses the session.
    """
    return _with_library(wish) if wish.dialect in ("A", "B") else _with_dialect(wish)


# --- A and B ---


class _LibrarySession:
    """A session of A or B."""

    answers_each_unit = True

    def __init__(self, session: DuplexSession, *, repeats_names: bool) -> None:
        self.end: str | None = None
        self._session = session
        self._repeats_names = repeats_names  # B repeats the name of an input

    async def send(self, number: int, unit: Samples, pictures: Sequence[bytes] = ()) -> None:
        input_id = str(number) if self._repeats_names else None
        await self._session.send(unit.data, pictures=pictures, input_id=input_id)

    async def replies(self) -> AsyncIterator[UnitReply]:
        try:
            async for output in self._session:
                yield self._reply(output)
        except ConnectionLostError as error:
            raise TalkError(f"the connection broke: {error}") from None
        except DuplexError as error:
            raise TalkError(str(error)) from None
        self.end = self._session.end.reason if self._session.end else None

    def _reply(self, output: Output) -> UnitReply:
        return UnitReply(
            unit=unit_of(output),
            is_speech=output.speaks or (output.end_of_turn and not output.interrupted),
            is_whole=not self._repeats_names or not output.speaks,
            text=output.text,
            audio=output.encoded_audio,
            context=output.context_tokens,
            end_of_turn=output.end_of_turn,
            listen_probability=output.listen_probability,
        )

    async def close(self) -> None:
        await self._session.close()


def unit_of(output: Output) -> int:
    """Return the number of the sent unit: its name, or if that is not repeated, the answer's."""
    named = output.input_id or ""
    return int(named) if named.isdecimal() else output.index


@contextlib.asynccontextmanager
async def _with_library(wish: Wish) -> AsyncGenerator[TalkSession]:
    def refused(error: InputError) -> None:
        wish.on_error(str(error))

    url = full_url(wish.url, "/v1/realtime")
    is_b = wish.dialect == "B"
    try:
        session = DuplexSession(
            url,
            dialect="B" if is_b else "A",
            mode=wish.mode,
            instructions=wish.prompt,
            voice=None if wish.voice is None else pcm_from_samples(wish.voice),
            seed=wish.seed,
            key=read_key(wish.key_file),
            uplink="float32",
            tls=tls_context(url, wish.ca),
            proxy=False,
            loads=orjson.loads,
            attempts=1,
            connect_timeout_s=client.OPEN_TIMEOUT_S,
            queue_timeout_s=QUEUE_TIMEOUT_S,
            resumable=wish.is_resumable,
            on_return=wish.on_return,
            on_queue=wish.on_queued,
            on_error=refused,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        await session.connect()
    except DuplexError as error:
        raise refusal(url, error) from None
    try:
        yield _LibrarySession(session, repeats_names=is_b)
    finally:
        await session.close()


def refusal(url: str, error: DuplexError) -> TalkError | client.ConnectError:
    """Return the error for a session that the client library could not begin."""
    if error.close_code is None and not isinstance(error, BusyError | InputError | ServerError):
        return connect_error(url, error)
    if isinstance(error, ConnectionLostError):
        return TalkError(f"the connection ended before the session began: {error.message}")
    return TalkError(f"the server refuses the session: {error.message}")


# --- C, E and L ---


class _DialectSession:
    """A session of another dialect."""

    def __init__(
        self, connection: ClientConnection, dialect: TalkDialect, on_error: Callable[[str], None]
    ) -> None:
        self.end: str | None = None
        self.answers_each_unit = dialect.answers_each_unit
        self._connection = connection
        self._dialect = dialect
        self._on_error = on_error

    async def send(self, number: int, unit: Samples, pictures: Sequence[bytes] = ()) -> None:
        frames = [pybase64.b64encode_as_string(picture) for picture in pictures]
        message = self._dialect.unit(number, base64_of(unit), frames)
        with contextlib.suppress(ConnectionClosed):  # `replies` tells the reason
            await self._connection.send(orjson.dumps(message), text=True)

    async def replies(self) -> AsyncIterator[UnitReply]:
        has_failed = False
        try:
            async for event in events_of(self._connection):
                match event.get("type"):
                    case "error":
                        has_failed = True
                        self._on_error(error_text(event))
                    case kind if kind in self._dialect.ended:
                        self.end = str(event.get("reason") or kind)
                        return
                    case _:
                        for reply in self._dialect.replies(event):
                            yield reply
        except ConnectionClosed as closed:
            raise TalkError(f"the connection broke: {closed}") from None
        if not self._dialect.ended and not has_failed:
            self.end = "the client ended the connection"

    async def close(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            await client.end(self._connection, self._dialect)


@contextlib.asynccontextmanager
async def _with_dialect(wish: Wish) -> AsyncGenerator[TalkSession]:
    voice = None if wish.voice is None else base64_of(wish.voice)
    dialect = DIALECTS[wish.dialect](wish.prompt, voice)
    url = full_url(wish.url, dialect.path(wish.mode))
    async with connected(url, wish.ca, wish.key_file) as connection:
        await begin(connection, dialect, wish.on_queued)
        yield _DialectSession(connection, dialect, wish.on_error)


def base64_of(samples: Samples) -> str:
    return pybase64.b64encode_as_string(pcm_from_samples(samples))
