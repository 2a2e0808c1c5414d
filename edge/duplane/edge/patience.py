"""How long a peer may take nothing of what is written to it. For any protocol on a transport."""

from __future__ import annotations

import asyncio

_STEP_BYTES = 64 * 1024  # what must have gone meanwhile: a drop now and then is no reading


class Patience:
    """Cuts a transport that is full, and of which nothing goes for `within_s`.

    To be told when it is full and when there is room again, as asyncio tells protocols. So a slow
    client that reads may take its time; one that does not read keeps what waits for it no longer.
    """

    def __init__(self, transport: asyncio.Transport, within_s: float) -> None:
        self.is_spent = False
        self._transport = transport
        self._within_s = within_s
        self._waiting_bytes = 0
        self._alarm: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """The transport is full."""
        self._waiting_bytes = self._transport.get_write_buffer_size()
        self._alarm = asyncio.get_running_loop().call_later(self._within_s, self._check)

    def end(self) -> None:
        """There is room again, or nobody to wait for."""
        if self._alarm:
            self._alarm.cancel()
            self._alarm = None

    def _check(self) -> None:
        if self._transport.get_write_buffer_size() > self._waiting_bytes - _STEP_BYTES:
            self.is_spent = True
            self._transport.abort()
        else:
            self.begin()
