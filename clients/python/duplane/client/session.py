"""`DuplexSession`: one conversation with the model, over one WebSocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from duplane.client.connecting import MAX_MESSAGE_BYTES, full_url, headers, opened
from duplane.client.errors import (
    BusyError,
    DuplexError,
    InputError,
    ServerError,
    error_of_close,
    retry_wait_s,
)
from duplane.client.events import (
    INPUT_RATE,
    Dialect,
    End,
    Event,
    Output,
    OutputReader,
    QueuePlace,
    append_message,
    error_of,
    queue_place,
    settings_event,
)
from duplane.client.sound import EncodedSound, Resampler, Uplink, encoded, pieces, samples_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CLOSE_S = 10.0  # until the server has confirmed a close
_LATE_COUNT = 1000  # events that come during a close and wait for the iteration; the oldest go
_CLOSED = "the session is closed"
# The codes of errors after which the server ends the session.
_FATAL = frozenset({"service_unavailable", "queue_full", "worker_busy", "worker_connect_failed"})
_FAILED = frozenset({"server_shutdown", "error", "backend_error"})


class DuplexSession:
    """One conversation. Use it with `async with`, send sound, and iterate over the outputs.

    `url` is `ws://HOST:PORT` or `wss://HOST`. `voice` is a WAV file with the voice to speak with,
    `options` are settings of the model, such as `length_penalty`. `key` is an API key or a token.
    `uplink` says how sound is sent: float32 needs twice the bytes of int16. The same `seed` and
    sound give the same answers (B only). `proxy` is the URL of a proxy, True for that of the
    environment, or False. `loads` parses JSON: a faster one than Python's may be given.

    `connect` tries up to `attempts` times while nothing is lost by it: until the conversation has
    begun. A conversation that breaks later is lost, and the iteration raises: begin a new session.
    The callbacks run in the task that connects or iterates. Without `on_error` the iteration raises
    an InputError, too; the session goes on, so it may be iterated again.

    A session that nobody iterates stops reading, and the server ends it after a while.
    """

    def __init__(  # noqa: PLR0913 - settings, which callers name
        self,
        url: str,
        *,
        dialect: Dialect = "B",
        mode: Literal["audio", "video"] = "audio",
        instructions: str = "You are a helpful assistant.",
        voice: bytes | None = None,
        seed: int | None = None,
        options: Mapping[str, object] | None = None,
        model: str | None = None,
        key: str | None = None,
        uplink: Uplink = "int16",
        tls: ssl.SSLContext | None = None,
        proxy: str | bool = True,
        loads: Callable[[str], Any] = json.loads,  # noqa: TID251 - needs nothing of ours
        attempts: int = 5,
        retry_base_s: float = 1.0,
        connect_timeout_s: float = 10.0,
        queue_timeout_s: float = 600.0,
        on_queue: Callable[[QueuePlace], None] | None = None,
        on_error: Callable[[InputError], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        if seed is not None and dialect == "A":
            raise ValueError("seed: dialect A has none")
        self._url = full_url(url, mode, model)
        self._dialect: Dialect = dialect
        encoded_voice = None if voice is None else base64.b64encode(voice).decode()
        self._settings = settings_event(dialect, instructions, encoded_voice, seed, options or {})
        self._headers = headers(key)
        self._uplink: Uplink = uplink
        self._tls, self._proxy, self._loads = tls, proxy, loads
        self._attempts, self._retry_base_s = attempts, retry_base_s
        self._connect_timeout_s, self._queue_timeout_s = connect_timeout_s, queue_timeout_s
        self._on_queue, self._on_error, self._on_event = on_queue, on_error, on_event
        self._socket: ClientConnection | None = None
        self._outputs = OutputReader()
        self._resampler: Resampler | None = None
        self._has_connected = self._must_listen = self._is_paused = False
        self._closing = asyncio.Event()
        self._reading = asyncio.Lock()
        self._late: deque[tuple[Event, float]] = deque(maxlen=_LATE_COUNT)
        self._failure: DuplexError | None = None
        self._refusal: DuplexError | None = None
        self.created: Event = {}
        """The event `session.created`."""
        self.end: End | None = None
        """How the session ended, if it ended in order."""

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- the beginning ---

    async def connect(self) -> Self:
        """Wait for a slot and begin the conversation. Raises DuplexError."""
        if self._has_connected:
            raise RuntimeError("a session connects once")
        self._has_connected = True
        attempt = 0
        while not self._closing.is_set():
            try:
                await self._try_to_connect()
                return self
            except DuplexError as error:
                wait_s = retry_wait_s(error, attempt, self._retry_base_s)
                attempt += 1
                if self._closing.is_set():
                    break
                if wait_s is None or attempt >= self._attempts:
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closing.wait()
        raise DuplexError(_CLOSED)

    async def _try_to_connect(self) -> None:
        self._refusal = None
        socket = await opened(
            self._url,
            self._headers,
            self._tls,
            proxy=self._proxy,
            timeout_s=self._connect_timeout_s,
        )
        self._socket = socket
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                while not self.created:
                    if self._closing.is_set():
                        raise DuplexError(_CLOSED)
                    await self._advance(socket)
        except BaseException as error:
            self._socket = self._failure = None
            await _closed(socket)
            if isinstance(error, TimeoutError):
                raise BusyError(f"no slot within {self._queue_timeout_s:g} s") from None
            raise

    async def _advance(self, socket: ClientConnection) -> None:
        """Handle one event before the conversation has begun."""
        event, _ = await self._next(socket) or ({}, 0.0)
        match event.get("type"):
            case "session.queued" | "session.queue_update":
                if self._on_queue:
                    self._on_queue(queue_place(event))
            case "session.queue_done":
                await self._send(socket, _json(self._settings))
            case "session.created":
                self._outputs.begin(event)
                self.created = event
            case "error" if (error := error_of(event)).code not in _FATAL:
                raise error
            case None:
                reason = self.end.reason if self.end else "closed"
                self.end = None
                raise ServerError("the session ended before it began", reason)
            case _:
                pass

    # --- what the client does ---

    async def send(
        self,
        sound: Buffer | EncodedSound,
        *,
        rate: int = INPUT_RATE,
        pictures: Sequence[bytes] = (),
        input_id: str | None = None,
    ) -> bool:
        """Send mono sound: bytes of int16, or an array of int16 or float. Pictures are files.

        Waits while the network takes nothing more. Returns False if nothing was sent: the session
        is paused or has ended, or the sound is too short for a sample. In B the outputs and errors
        about this sound have its `input_id`. Raises ValueError.
        """
        if input_id is not None and self._dialect == "A":
            raise ValueError("input_id: dialect A has none")
        given = sound.pieces if isinstance(sound, EncodedSound) else samples_of(sound)
        socket = self._socket
        if self._is_paused or socket is None or self._closing.is_set():
            return False
        appends = given if isinstance(given, tuple) else self._encoded(given, rate)
        frames = [base64.b64encode(picture).decode() for picture in pictures]
        for audio in appends or ([b""] if frames else []):
            force_listen, self._must_listen = self._must_listen, False
            event = append_message(
                self._dialect, audio, frames, force_listen=force_listen, input_id=input_id
            )
            if not await self._send(socket, event):
                return False
            frames = []
        return bool(appends or pictures)

    def _encoded(self, samples: array[float], rate: int) -> Sequence[bytes]:
        if self._resampler is None or self._resampler.rate != rate:
            self._resampler = Resampler(rate)
        samples = self._resampler.add(samples)
        return [encoded(piece, self._uplink) for piece in pieces(samples) if piece]

    def interrupt(self) -> None:
        """Stop the model: the next sound makes it listen, and the rest of its turn is dropped.

        The caller drops what it has not played yet.
        """
        self._must_listen = True
        self._outputs.flush()

    def pause(self) -> None:
        """Drop sound instead of sending it. The server ends a session that is paused too long."""
        self._is_paused = True
        self._resampler = None

    def resume(self) -> None:
        """Send sound again."""
        self._is_paused = False

    async def close(self, reason: str = "user_stop") -> None:
        """End the session, or leave the queue: then `connect`, in its task, raises DuplexError.

        Outputs that come meanwhile wait for the iteration.
        """
        is_closing, socket = self._closing.is_set(), self._socket
        self._closing.set()
        if is_closing or socket is None:
            return
        try:
            with contextlib.suppress(TimeoutError, DuplexError):
                async with asyncio.timeout(_CLOSE_S):
                    event = {"type": "session.close", "reason": reason}
                    await self._send(socket, _json(event))
                    while late := await self._next(socket):
                        self._late.append(late)
        finally:
            await _closed(socket)

    # --- what the server does ---

    def __aiter__(self) -> Self:
        """Yield outputs until the session ends in order (see `end`). Raises DuplexError."""
        return self

    async def __anext__(self) -> Output:
        if self._socket is None:
            raise RuntimeError("the session is not connected")
        while found := await self._next(self._socket, takes_late=True):
            event, received_s = found
            if event.get("type") == "error":
                self._reject(error_of(event))
            elif output := self._read(event, received_s):
                return output
        raise StopAsyncIteration

    def _read(self, event: Event, received_s: float) -> Output | None:
        try:
            return self._outputs.read(event, received_s)
        except ServerError as error:
            self._failure = error
            raise

    def _reject(self, error: InputError) -> None:
        if error.code in _FATAL:
            return  # the close follows
        if self._on_error is None:
            raise error
        self._on_error(error)

    async def _next(
        self, socket: ClientConnection, *, takes_late: bool = False
    ) -> tuple[Event, float] | None:
        """Return the next event and its time, in order also if another task closes the session."""
        async with self._reading:
            if takes_late and self._late:
                return self._late.popleft()
            return await self._receive(socket)

    async def _receive(self, socket: ClientConnection) -> tuple[Event, float] | None:
        """Return the next event and its time; None at the end in order. Raises DuplexError."""
        if self._failure:
            raise self._failure
        if self.end:
            return None
        try:
            message = await socket.recv()
            received_s = time.monotonic()
            event = self._parsed(message)
            if event.get("type") != "session.closed":
                return event, received_s
            await self._finish(socket, str(event.get("reason", "")))
        except ConnectionClosed as closed:
            if not self._closing.is_set():
                self._failure = self._error_of_close(closed)
                raise self._failure from None
            self.end = End("closed")
        except DuplexError as error:
            self._failure = error
            raise
        return None

    def _parsed(self, message: str | bytes) -> Event:
        event: Any = None
        if isinstance(message, str):
            with contextlib.suppress(ValueError):
                event = self._loads(message)
        match event:
            case {"type": str()}:
                pass
            case _:
                raise ServerError("the server sent a message that is no event")
        if self._on_event:
            self._on_event(event)
        if event["type"] == "error":
            self._refusal = error_of(event)
        return event

    async def _finish(self, socket: ClientConnection, reason: str) -> None:
        if reason in _FAILED and not self._closing.is_set():
            raise ServerError("the server ended the session", reason)
        self.end = End(reason)
        await _closed(socket)  # the server lingers until the client closes

    def _error_of_close(self, closed: ConnectionClosed) -> DuplexError:
        if closed.sent and not closed.rcvd and closed.sent.code == CloseCode.MESSAGE_TOO_BIG:
            return ServerError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")
        code, text = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (1006, "")
        if closed.sent and not closed.rcvd:
            text = closed.sent.reason  # for example, that no answer to a ping came
        refusal = self._refusal
        if refusal is None or refusal.code not in _FATAL:
            return error_of_close(code, text)
        return error_of_close(code, refusal.message, refusal.code)

    async def _send(self, socket: ClientConnection, event: bytes) -> bool:
        """Send an event; return False if the connection is closed. Who receives, learns why."""
        try:
            await socket.send(event, text=True)
        except ConnectionClosed:
            return False
        return True


def _json(event: Mapping[str, object]) -> bytes:
    return json.dumps(event).encode()


async def _closed(socket: ClientConnection) -> None:
    """Close the connection; if the caller is cancelled meanwhile, at once."""
    try:
        await socket.close()
    finally:
        socket.transport.abort()
