"""The connections of a simulated fabric: calls of real servicers with delays and cuts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any


class CallError(Exception):
    """A call ended with a status other than OK."""

    def __init__(self, code: str, details: str = "") -> None:
        super().__init__(f"{code}: {details}")
        self.code = code


class Call:
    """One call: the context for the server, and the methods of the client."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._to_client: asyncio.Queue[Any] = asyncio.Queue()
        self._to_server: asyncio.Queue[Any] = asyncio.Queue()
        self._serving: asyncio.Task[None] | None = None
        self._is_half_open = False
        self.has_answered = False  # the server has sent a message
        self.on_applied: Callable[[Any], None] = lambda _: None  # takes each message to the server

    def begin(
        self,
        serve: Callable[[Any], Coroutine[Any, Any, None]],
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Run the server's method with this object as its context; call `on_end` when it ends."""
        self._serving = asyncio.create_task(self._serve(serve))
        self._serving.add_done_callback(lambda _: on_end())

    async def _serve(self, serve: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        end = CallError("UNAVAILABLE", "cut")
        try:
            await serve(self)
            end = CallError("OK")
        except CallError as error:
            end = error
        except Exception as error:  # noqa: BLE001 - as in gRPC, it ends only the call
            end = CallError("UNKNOWN", str(error))
        finally:
            self._to_client.put_nowait(end)

    def cut(self) -> None:
        """Break the connection. Both ends detect the break immediately."""
        if not self._is_half_open:
            self.end()

    def half_cut(self, notice_s: float) -> None:
        """Break the connection. The client notices immediately, the server after `notice_s`."""
        self._is_half_open = True
        self._to_client.put_nowait(CallError("UNAVAILABLE", "half cut"))
        asyncio.get_running_loop().call_later(notice_s, self.end)

    def end(self) -> None:
        """End the server's method now."""
        if self._serving and not self._serving.done():
            self._serving.cancel()

    async def read(self) -> Any:
        """Return the next message for the client. Raises CallError at the end of the call."""
        message = await self._to_client.get()
        if isinstance(message, CallError):
            raise message
        return message

    def send(self, message: Any) -> None:
        """Send a message to the server."""
        self._to_server.put_nowait(message)

    async def requests(self) -> AsyncGenerator[Any]:
        """Yield the messages to the server, in the form in which gRPC gives them to a servicer.

        Servicers take the next message after they have applied the previous one.
        """
        while True:
            message = await self._to_server.get()
            await delay(self._chance)
            yield message
            self.on_applied(message)

    async def write(self, message: Any) -> None:
        """Send a message to the client, as a servicer does."""
        await delay(self._chance)
        self._to_client.put_nowait(message)
        self.has_answered = True

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that the client sent: none."""
        return ()

    def auth_context(self) -> dict[str, Iterable[bytes]]:
        """Return the properties of a TLS connection: none."""
        return {}

    def peer(self) -> str:
        """Return the client's address, in the form in which gRPC writes it."""
        return "ipv4:127.0.0.1:1"

    async def abort_with_status(self, status: Any) -> None:
        """End the call with an error, as a servicer does."""
        raise CallError(status.code.name, status.details)


async def delay(chance: random.Random) -> None:
    """Wait for the delay of a message: usually short, sometimes very long."""
    await asyncio.sleep(chance.uniform(0, 0.02) if chance.random() < 0.97 else chance.uniform(0, 8))
