"""`DuplexSession`: one conversation with the model, over one WebSocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlencode, urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
)

from duplane.client.errors import (
    BusyError,
    ConnectionLostError,
    DuplexError,
    InputError,
    RefusedError,
    ServerError,
    error_of_close,
    error_of_status,
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
    append_event,
    queue_place,
    settings_event,
)
from duplane.client.sound import Resampler, Uplink, encoded, pieces, samples_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # a longer message of the server ends the session
_CLOSE_S = 10.0  # until the server has confirmed a close
_PATH = "/v1/realtime"
# The codes of errors after which the server ends the session.
_FATAL = frozenset({"service_unavailable", "queue_full", "worker_busy", "worker_connect_failed"})
_FAILED = frozenset({"server_shutdown", "error", "backend_error"})


class DuplexSession:
    """One conversation. Use it with `async with`, send sound, and iterate over the outputs.

    `url` is `ws://HOST:PORT` or `wss://HOST`. `voice` is a WAV file with the voice to speak with,
    `options` are settings of the model, such as `length_penalty`. `key` is an API key or a token.
    `uplink` says how sound is sent: float32 needs twice the bytes of int16.

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
        options: Mapping[str, object] | None = None,
        model: str | None = None,
        key: str | None = None,
        uplink: Uplink = "int16",
        tls: ssl.SSLContext | None = None,
        attempts: int = 5,
        retry_base_s: float = 1.0,
        connect_timeout_s: float = 10.0,
        queue_timeout_s: float = 600.0,
        on_queue: Callable[[QueuePlace], None] | None = None,
        on_error: Callable[[InputError], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._url = _full_url(url, mode, model)
        self._dialect: Dialect = dialect
        encoded_voice = None if voice is None else base64.b64encode(voice).decode()
        self._settings = settings_event(dialect, instructions, encoded_voice, options or {})
        self._headers = {"Authorization": f"Bearer {key}"} if key else None
        self._uplink: Uplink = uplink
        self._tls = tls
        self._attempts, self._retry_base_s = attempts, retry_base_s
        self._connect_timeout_s, self._queue_timeout_s = connect_timeout_s, queue_timeout_s
        self._on_queue, self._on_error, self._on_event = on_queue, on_error, on_event
        self._socket: ClientConnection | None = None
        self._outputs = OutputReader()
        self._resampler: Resampler | None = None
        self._must_listen = self._is_paused = self._is_closing = False
        self._reading = asyncio.Lock()
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
        if self._socket is not None:
            raise RuntimeError("a session connects once")
        attempt = 0
        while True:
            try:
                await self._try_to_connect()
                return self
            except DuplexError as error:
                wait_s = retry_wait_s(error, attempt, self._retry_base_s)
                attempt += 1
                if wait_s is None or attempt >= self._attempts:
                    raise
            await asyncio.sleep(wait_s)

    async def _try_to_connect(self) -> None:
        self._refusal = None
        self._socket = socket = await self._upgrade()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                while not self.created:
                    await self._advance(socket)
        except BaseException as error:
            self._socket = None
            await socket.close()
            if isinstance(error, TimeoutError):
                raise BusyError(f"no slot within {self._queue_timeout_s:g} s") from None
            raise

    async def _upgrade(self) -> ClientConnection:
        try:
            return await connect(
                self._url,
                ssl=self._tls,
                additional_headers=self._headers,
                compression=None,
                open_timeout=self._connect_timeout_s,
                max_size=_MAX_MESSAGE_BYTES,
            )
        except InvalidURI as error:
            raise RefusedError(str(error)) from None
        except InvalidStatus as error:
            answer = error.response
            raise error_of_status(answer.status_code, answer.headers.get("Retry-After")) from None
        except ssl.SSLCertVerificationError as error:
            raise RefusedError(f"its certificate is not trusted: {error.verify_message}") from None
        except (OSError, TimeoutError, InvalidHandshake) as error:
            raise ConnectionLostError(f"no connection: {error}") from None

    async def _advance(self, socket: ClientConnection) -> None:
        """Handle one event before the conversation has begun."""
        event = await self._receive(socket)
        match event and event.get("type"):
            case "session.queued" | "session.queue_update":
                if self._on_queue:
                    self._on_queue(queue_place(event or {}))
            case "session.queue_done":
                await self._send(socket, self._settings)
            case "session.created":
                self.created = event or {}
            case "error" if (error := _error_of(event or {})).code not in _FATAL:
                raise error
            case None:
                reason = self.end.reason if self.end else "closed"
                self.end = None
                raise ServerError("the session ended before it began", reason)
            case _:
                pass

    # --- what the client does ---

    async def send(
        self, sound: Buffer, *, rate: int = INPUT_RATE, pictures: Sequence[bytes] = ()
    ) -> bool:
        """Send mono sound: bytes of int16, or an array of int16 or float. Pictures are files.

        Waits while the network takes nothing more. Returns False if nothing was sent: the session
        is paused or has ended, or the sound is too short for a sample. Raises ValueError.
        """
        samples = samples_of(sound)
        if self._is_paused or self._socket is None or self._is_closing:
            return False
        if self._resampler is None or self._resampler.rate != rate:
            self._resampler = Resampler(rate)
        samples = self._resampler.add(samples)
        frames = [base64.b64encode(picture).decode() for picture in pictures]
        if not samples and not frames:
            return False
        for piece in pieces(samples):
            if not await self._append(self._socket, piece, frames):
                return False
            frames = []
        return True

    async def _append(
        self, socket: ClientConnection, piece: array[float], frames: Sequence[str]
    ) -> bool:
        force_listen, self._must_listen = self._must_listen, False
        audio = encoded(piece, self._uplink) if piece else ""
        event = append_event(self._dialect, audio, frames, force_listen=force_listen)
        return await self._send(socket, event)

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
        """End the session. Outputs that come meanwhile may be lost."""
        socket = self._socket
        if socket is None or self._is_closing:
            return
        self._is_closing = True
        with contextlib.suppress(TimeoutError, DuplexError):
            async with asyncio.timeout(_CLOSE_S):
                await self._send(socket, {"type": "session.close", "reason": reason})
                while await self._receive(socket):
                    pass
        await socket.close()

    # --- what the server does ---

    def __aiter__(self) -> Self:
        """Yield outputs until the session ends in order (see `end`). Raises DuplexError."""
        return self

    async def __anext__(self) -> Output:
        if self._socket is None:
            raise RuntimeError("the session is not connected")
        while event := await self._receive(self._socket):
            if event.get("type") == "error":
                self._reject(_error_of(event))
            elif output := _output_of(self._outputs, event):
                return output
        raise StopAsyncIteration

    def _reject(self, error: InputError) -> None:
        if error.code in _FATAL:
            return  # the close follows
        if self._on_error is None:
            raise error
        self._on_error(error)

    async def _receive(self, socket: ClientConnection) -> Event | None:
        """Return the next event; None at the end in order. Raises DuplexError."""
        async with self._reading:
            if self.end:
                return None
            try:
                event = _parsed(await socket.recv())
            except ConnectionClosed as closed:
                if self._is_closing:
                    self.end = End("closed")
                    return None
                raise self._error_of_close(closed) from None
            return await self._taken(socket, event)

    async def _taken(self, socket: ClientConnection, event: Event) -> Event | None:
        if self._on_event:
            self._on_event(event)
        if event.get("type") == "error":
            self._refusal = _error_of(event)
        if event.get("type") != "session.closed":
            return event
        reason = str(event.get("reason", ""))
        await socket.close()  # the server lingers until the client closes
        if reason in _FAILED and not self._is_closing:
            raise ServerError("the server ended the session", reason)
        self.end = End(reason)
        return None

    def _error_of_close(self, closed: ConnectionClosed) -> DuplexError:
        code, text = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (1006, "")
        refusal = self._refusal
        if refusal is None or refusal.code not in _FATAL:
            return error_of_close(code, text)
        return error_of_close(code, refusal.message, refusal.code)

    async def _send(self, socket: ClientConnection, event: Mapping[str, object]) -> bool:
        """Send an event; return False if the connection is closed. Who receives, learns why."""
        try:
            await socket.send(json.dumps(event, separators=(",", ":")))
        except ConnectionClosed:
            return False
        return True


def _full_url(url: str, mode: str, model: str | None) -> str:
    parts = urlsplit(url)
    schemes = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
    if parts.scheme not in schemes or not parts.netloc:
        raise ValueError(f"url is {url!r}, must be ws://HOST:PORT or wss://HOST")
    path = _PATH if parts.path in ("", "/") else parts.path
    query = urlencode({"mode": mode} | ({"model": model} if model else {}))
    query = f"{parts.query}&{query}" if parts.query else query
    return urlunsplit((schemes[parts.scheme], parts.netloc, path, query, ""))


def _parsed(message: str | bytes) -> Event:
    event: Any = None
    with contextlib.suppress(ValueError):
        event = json.loads(message)  # noqa: TID251 - needs nothing of ours
    match event:
        case {"type": str()}:
            return event
        case _:
            raise ServerError("the server sent a message that is no event")


def _error_of(event: Event) -> InputError:
    match event.get("error"):
        case {"code": str(code), "message": str(message)}:
            return InputError(message, code)
        case other:
            return InputError(str(other))


def _output_of(outputs: OutputReader, event: Event) -> Output | None:
    try:
        return outputs.read(event)
    except (TypeError, ValueError) as error:
        raise ServerError(f"the server sent an output that cannot be read: {error}") from None
