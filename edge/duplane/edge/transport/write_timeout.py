"""Cuts a connection whose peer does not read. Usable by any asyncio protocol."""

from __future__ import annotations

import asyncio

_STEP_BYTES = 64 * 1024  # a client that reads less than this counts as not reading


class WriteTimeout:
    """Aborts a transport whose write buffer does not shrink for `timeout_s`.

    A protocol calls `start` from `pause_writing` and `stop` from `resume_writing`. A client that
    reads slowly but steadily is not cut, even if it needs longer than `timeout_s` for the whole
    buffer.
    """

    def __init__(self, transport: asyncio.Transport, timeout_s: float) -> None:
        self.is_expired = False
        self._transport = transport
        self._timeout_s = timeout_s
        self._buffered_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to wait for the write buffer to shrink."""
        self._buffered_bytes = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)

    def stop(self) -> None:
        """Stop waiting, because the buffer has room again or the connection is lost."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._transport.get_write_buffer_size() > self._buffered_bytes - _STEP_BYTES:
            self.is_expired = True
            self._transport.abort()
        else:
            self.start()
