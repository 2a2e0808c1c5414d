"""Interfaces: `Client` is a client's connection, `Receiver` handles the client's messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from duplane.edge.close import Close


class Receiver(Protocol):
    """Handles a client's messages and the end of its connection."""

    async def receive(self, message: bytes, waited_s: float = 0.0) -> None:
        """Handle one message, whose last byte was received `waited_s` ago."""
        ...

    def end(self, close: Close) -> None:
        """End the session."""
        ...


class Client(Protocol):
    """A client's connection: a WebSocket, or one HTTP request."""

    async def serve(self, receiver: Receiver) -> None:
        """Read messages until the connection is closed, or until cancelled."""
        ...

    def send(self, events: list[bytes], on_written: Callable[[], None] | None = None) -> None:
        """Send events to the client, or queue them. Raises OutboxFullError.

        `on_written` is called when the connection has taken the events.
        """
        ...

    async def close(self, close: Close, code: int) -> None:
        """Send the queued events and close the connection."""
        ...


class SocketClient(Client, Protocol):
    """A client's WebSocket."""

    @property
    def is_open(self) -> bool:
        """Whether the connection is neither closed nor lost, as far as the edge knows."""
        ...


class _NoClient:
    """Stands for the connection of a session that has none: its events are dropped."""

    async def serve(self, receiver: Receiver) -> None:
        del receiver

    def send(self, events: list[bytes], on_written: Callable[[], None] | None = None) -> None:
        del events
        if on_written:
            on_written()

    async def close(self, close: Close, code: int) -> None:
        del close, code


NO_CLIENT: Client = _NoClient()
