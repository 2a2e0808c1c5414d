"""Returns a session to its server on another socket, after a loss or when the server asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.client.connecting import close_socket, error_of_closed
from duplane.client.errors import ConnectionLostError, DuplexError
from duplane.client.events import Event, error_of
from duplane.client.resuming import (
    ATTEMPTS,
    BUSY,
    REFUSALS,
    Resumption,
    Return,
    ReturnWait,
    SentInput,
)

Answered = tuple[ClientConnection, Event]
_BUSY_S = 0.5  # before the next attempt, if a move or a drain of the session is in progress
_MIN_WAIT_S = 0.001
_ASKED_WAIT_S = 1.0  # before the next attempt to leave a server that shuts down


class RefusedReturnError(ConnectionLostError):
    """The server has the session no longer, or does not give it to this client."""

    can_retry = False


async def ask(
    open_socket: Callable[[], Awaitable[ClientConnection]],
    request: bytes,
    parse: Callable[[str | bytes], Event],
    timeout_s: float,
) -> Answered:
    """Ask for the session on a new socket, and return this socket and the answer.

    Raises DuplexError.
    """
    socket = await open_socket()
    refusal: DuplexError | None = None
    try:
        async with asyncio.timeout(timeout_s):
            await socket.send(request, text=True)
            while True:
                event = parse(await socket.recv())
                match event.get("type"):
                    case "session.resumed":
                        return socket, event
                    case "error":
                        refusal = error_of(event)
                        if refusal.code in REFUSALS:
                            raise RefusedReturnError(refusal.message, refusal.code)
                    case _:
                        pass  # the server may tell the place in the queue before it reads
    except ConnectionClosed as closed:
        raise error_of_closed(closed, refusal) from None
    except TimeoutError:
        await close_socket(socket)
        raise ConnectionLostError(f"no answer to a return within {timeout_s:g} s") from None
    except BaseException:
        await close_socket(socket)
        raise


class Returning:
    """Returns one session: it keeps what the server may lack, and asks for the session again."""

    def __init__(
        self,
        open_socket: Callable[[], Awaitable[ClientConnection]],
        parse: Callable[[str | bytes], Event],
        timeout_s: float,
        wait_s: ReturnWait,
        on_lost: Callable[[], None] | None,
        on_return: Callable[[Return], None] | None,
    ) -> None:
        self.resumption = Resumption()
        self.input = SentInput()
        self.leave_s: float | None = None
        """When the client goes to another server, because this one has asked for it."""
        self._open_socket, self._parse, self._timeout_s = open_socket, parse, timeout_s
        self._wait_s, self._on_lost, self._on_return = wait_s, on_lost, on_return

    @property
    def leave_wait_s(self) -> float:
        """The seconds until the client goes to another server; 0 if it stays."""
        return 0.0 if self.leave_s is None else max(_MIN_WAIT_S, self.leave_s - time.monotonic())

    async def after_loss(self, closing: asyncio.Event) -> ClientConnection:
        """Return the socket that has the session after a loss.

        At most `ATTEMPTS` are made, while the server keeps the session. Raises the last error, or
        DuplexError if the session is closed meanwhile.
        """
        self.leave_s = None
        self.input.is_away = True
        lost_s = time.monotonic()
        if self._on_lost:
            self._on_lost()
        tried = 0
        pause_s = self._wait_s(tried)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await closing.wait()
            if closing.is_set():
                raise DuplexError("the session is closed")
            began_s = time.monotonic()
            try:
                socket, answer = await self._ask()
            except RefusedReturnError:
                raise
            except DuplexError as error:
                is_busy = error.code == BUSY
                tried += not is_busy
                pause_s = _BUSY_S if is_busy else self._wait_s(tried)
                left_s = lost_s + self.resumption.within_s - time.monotonic()
                if tried >= ATTEMPTS or pause_s > left_s:
                    raise
            else:
                self._begin(answer, tried + 1, began_s, lost_s)
                return socket

    async def leave(self, socket: ClientConnection) -> ClientConnection:
        """Go to another server; without success, stay for a while. Return the socket to use."""
        began_s = time.monotonic()
        try:
            following, answer = await self._ask()
        except DuplexError:
            self.leave_s = time.monotonic() + _ASKED_WAIT_S
            return socket
        self.leave_s = None
        socket.transport.abort()  # who writes to it must not wait
        self._begin(answer, 1, began_s, None)
        return following

    def is_wanted(self, event: Event, received_s: float) -> bool:
        """Return whether an event is news for the caller of the session."""
        if event.get("type") == "session.go_away":
            self.leave_s = received_s + float(event.get("after_s", 0.0))
            return False
        return self.resumption.is_new(event)

    async def _ask(self) -> Answered:
        self.input.is_asked = True
        try:
            request = json.dumps(self.resumption.request(self.input.first_sample)).encode()
            return await ask(self._open_socket, request, self._parse, self._timeout_s)
        finally:
            self.input.is_asked = False

    def _begin(self, answer: Event, attempts: int, began_s: float, lost_s: float | None) -> None:
        """Let the input that the server does not have wait for the new socket."""
        now_s = time.monotonic()
        lost_samples = self.input.rewind(int(answer.get("next_sample", 0)))
        back = Return(
            gap_s=float(answer.get("gap_s", 0.0)),
            away_s=0.0 if lost_s is None else now_s - lost_s,
            took_s=now_s - began_s,
            attempts=attempts,
            # Input that was sent, but did not arrive, is known only to the server.
            lost_samples=max(lost_samples, int(answer.get("lost_samples", 0))),
            was_asked=lost_s is None,
        )
        if self._on_return:
            self._on_return(back)
