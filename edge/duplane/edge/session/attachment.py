"""One socket of a session. Only the newest socket of a session counts."""

from __future__ import annotations

import asyncio
from typing import Protocol

from duplane.edge.close import Close
from duplane.edge.transport.client import Client


class SocketOwner(Protocol):
    """Runs the session of a socket."""

    async def receive(self, message: bytes, waited_s: float = 0.0) -> None:
        """Handle one message of the client."""
        ...

    def disconnected(self, close: Close) -> None:
        """Handle that the socket of the session is lost, or that it must be closed."""
        ...


class Attachment:
    """The socket of a session, until another one replaces it."""

    def __init__(self, owner: SocketOwner, client: Client) -> None:
        self.client = client
        self.is_current = True
        self.is_closed = asyncio.Event()  # its closing handshake is done
        self._owner = owner

    async def receive(self, message: bytes, waited_s: float = 0.0) -> None:
        """Pass a message on."""
        if self.is_current:
            await self._owner.receive(message, waited_s)

    def end(self, close: Close) -> None:
        """Pass on that the socket is lost, or that it must be closed."""
        if self.is_current:
            self._owner.disconnected(close)

    async def serve(self) -> None:
        """Read messages until the socket is closed."""
        await self.client.serve(self)

    async def close(self, close: Close, code: int) -> None:
        """Close the socket. No message counts any more."""
        self.is_current = False
        try:
            await self.client.close(close, code)
        finally:
            self.is_closed.set()
