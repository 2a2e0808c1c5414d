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
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.client.connecting import close_socket, error_of_closed, full_url, headers, opened
from duplane.client.errors import (
    BusyError,
    ConnectionLostError,
    DuplexError,
    InputError,
    RefusedError,
    ServerError,
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
from duplane.client.resuming import Return, ReturnWait, SentInput, return_wait_s
from duplane.client.returning import Returning
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
    If it is `resumable`, and the server allows this, the iteration returns to it instead, on a new
    connection. `on_lost` is called when it begins to return, `on_return` when it has returned, and
    the caller notices nothing else. A connection that is silent for `silence_s` then counts as
    broken. The last 10 s of input are kept and sent again. The events that were missed come first;
    do not play them if the gap was longer than about 3 s. A server that shuts down asks the client
    to go to another one, which it does by itself, also while it waits in the queue. If another
    connection takes the session, it ends with `replaced`.

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
        resumable: bool = False,
        silence_s: float = 4.0,
        return_wait: ReturnWait = return_wait_s,
        on_lost: Callable[[], None] | None = None,
        on_return: Callable[[Return], None] | None = None,
        on_queue: Callable[[QueuePlace], None] | None = None,
        on_error: Callable[[InputError], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        if seed is not None and dialect == "A":
            raise ValueError("seed: dialect A has none")
        self._url = full_url(url, mode, model)
        self._dialect: Dialect = dialect
        encoded_voice = None if voice is None else base64.b64encode(voice).decode()
        self._settings = partial(
            settings_event, dialect, instructions, encoded_voice, seed, options or {}
        )
        self._returning = (
            Returning(
                self._opened, self._parsed, connect_timeout_s, return_wait, on_lost, on_return
            )
            if resumable
            else None
        )
        self._ping_s = silence_s / 2 if resumable else None
        self._sending = asyncio.Lock()  # of a resumable session
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
        self._socket = socket = await self._opened()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                if self._returning:  # the edge tells it its place in a form that it can show
                    self._returning.leave_s = None
                    await self._send(socket, self._first_event())
                while not self.created:
                    if self._closing.is_set():
                        raise DuplexError(_CLOSED)
                    await self._advance(socket)
        except BaseException as error:
            self._socket = self._failure = None
            await close_socket(socket)
            if isinstance(error, TimeoutError):
                raise BusyError(f"no slot within {self._queue_timeout_s:g} s") from None
            raise

    async def _opened(self) -> ClientConnection:
        return await opened(
            self._url,
            self._headers,
            self._tls,
            proxy=self._proxy,
            timeout_s=self._connect_timeout_s,
            ping_s=self._ping_s,
        )

    def _first_event(self) -> bytes:
        return _json(self._settings(self._returning.resumption.settings if self._returning else {}))

    async def _advance(self, socket: ClientConnection) -> None:
        """Handle one event before the conversation has begun."""
        event, _ = await self._next(socket) or ({}, 0.0)
        match event.get("type"):
            case "session.queued" | "session.queue_update":
                if self._on_queue:
                    self._on_queue(queue_place(event))
            case "session.queue_done":
                if not self._returning:
                    await self._send(socket, self._first_event())
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
            if self._returning and self._returning.resumption.is_possible:
                self._returning.input.add(
                    audio, frames, force_listen=force_listen, input_id=input_id
                )
                await self._send_input(self._returning.input)
            elif not await self._send(
                socket,
                append_message(
                    self._dialect, audio, frames, force_listen=force_listen, input_id=input_id
                ),
            ):
                return False
            frames = []
        return bool(appends or pictures)

    async def _send_input(self, kept: SentInput) -> None:
        """Send what waits. While the connection is broken, it waits on."""
        async with self._sending:
            while (socket := self._socket) and (one := kept.take()):
                message = append_message(
                    self._dialect,
                    one.audio,
                    one.frames,
                    force_listen=one.force_listen,
                    input_id=one.input_id,
                )
                if not await self._send(socket, message):
                    return

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
            await close_socket(socket)

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
        try:
            while not self.end:
                try:
                    message = await self._message(socket)
                    received_s = time.monotonic()
                    event = self._parsed(message)
                    if await self._is_news(event, received_s, socket):
                        return event, received_s
                except ConnectionClosed as closed:
                    socket = await self._broke(socket, closed)
        except DuplexError as error:
            self._failure = error
            raise
        return None

    async def _is_news(self, event: Event, received_s: float, socket: ClientConnection) -> bool:
        """Return whether an event is for the caller; handle those about the connection."""
        kind, returning = event.get("type"), self._returning
        if kind == "session.closed":
            await self._finish(socket, str(event.get("reason", "")))
            return False
        if returning is None:
            return True
        if kind == "session.replaced":
            self.end = End("replaced")
            return False
        is_news = returning.is_wanted(event, received_s)
        if not self.created and (wait_s := returning.leave_wait_s):
            raise ConnectionLostError("the server shuts down", retry_after_s=wait_s)
        if is_news and returning.input.begun(event):
            await self._send_input(returning.input)
        return is_news

    async def _message(self, socket: ClientConnection) -> str | bytes:
        """Return the next message. Leave the server first if it has asked for this."""
        returning = self._returning
        while returning and returning.leave_s is not None and not self._closing.is_set():
            try:
                async with asyncio.timeout(max(0.0, returning.leave_s - time.monotonic())):
                    return await socket.recv()
            except TimeoutError:
                socket = await self._use(await returning.leave(socket), returning)
        return await socket.recv()

    async def _broke(self, socket: ClientConnection, closed: ConnectionClosed) -> ClientConnection:
        """Return to the session on another socket, if that is possible. Raises DuplexError."""
        if self._socket and socket is not self._socket:
            return self._socket  # it was left meanwhile
        returning = self._returning
        refusal = self._refusal if self._refusal and self._refusal.code in _FATAL else None
        error = error_of_closed(closed, refusal)
        may_return = returning and returning.resumption.is_possible and self.created
        if not self._closing.is_set():
            if not returning or not may_return or isinstance(error, RefusedError):
                raise error
            try:
                return await self._use(await returning.after_loss(self._closing), returning)
            except DuplexError:
                if not self._closing.is_set():
                    raise
        self.end = End("closed")
        return socket

    async def _use(self, socket: ClientConnection, returning: Returning) -> ClientConnection:
        """Use a socket from now on, and send what waits for it."""
        self._socket, self._refusal = socket, None
        await self._send_input(returning.input)
        return socket

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
        if self._returning:
            # Neither callers nor their logs need the tokens.
            event = self._returning.resumption.read(event)
        if self._on_event:
            self._on_event(event)
        if event["type"] == "error":
            self._refusal = error_of(event)
        return event

    async def _finish(self, socket: ClientConnection, reason: str) -> None:
        if reason in _FAILED and not self._closing.is_set():
            raise ServerError("the server ended the session", reason)
        self.end = End(reason)
        await close_socket(socket)  # the server lingers until the client closes

    async def _send(self, socket: ClientConnection, event: bytes) -> bool:
        """Send an event; return False if the connection is closed. Who receives, learns why."""
        try:
            await socket.send(event, text=True)
        except ConnectionClosed:
            return False
        return True


def _json(event: Mapping[str, object]) -> bytes:
    return json.dumps(event).encode()
