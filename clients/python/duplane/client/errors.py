"""Errors as types, and the rules for trying again."""

from __future__ import annotations

import random

MAX_WAIT_S = 30.0
"""The longest wait that a client chooses by itself."""
MAX_RETRY_AFTER_S = 300.0
"""If a server asks for a longer wait, `connect` does not wait but raises."""


class DuplexError(Exception):
    """A session failed. `code` is the server's word for the reason, or empty.

    `close_code` is that of the WebSocket, `status` that of HTTP if the upgrade was refused, and
    `retry_after_s` the wait that the server asks for. `input_id` names the refused input, if `send`
    gave it a name.
    """

    can_retry = True
    """Whether a new session may succeed with the same arguments."""

    def __init__(
        self,
        message: str,
        code: str = "",
        *,
        close_code: int | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        input_id: str | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}" if code else message)
        self.message = message
        self.code = code
        self.close_code = close_code
        self.status = status
        self.retry_after_s = retry_after_s
        self.input_id = input_id


class InputError(DuplexError):
    """The server refuses settings, or one input; in the second case the session goes on."""

    can_retry = False


class RefusedError(DuplexError):
    """The server refuses this client: its credential, its mode, a message, or slow reading."""

    can_retry = False


class BusyError(DuplexError):
    """The server has no room now."""


class ServerError(DuplexError):
    """The server or the model failed or shuts down. The conversation is lost."""


class ConnectionLostError(DuplexError):
    """There is no connection to the server, or it broke. The conversation is lost."""


def error_of_close(close_code: int, message: str, code: str = "") -> DuplexError:
    """Return the error for a close code of a WebSocket."""
    match close_code:
        case 1013:
            kind: type[DuplexError] = BusyError
        case 1003 | 1007 | 1008 | 1009:
            kind = RefusedError
        case 1001 | 1011:
            kind = ServerError
        case _:
            kind = ConnectionLostError
    return kind(message or f"the connection is closed ({close_code})", code, close_code=close_code)


def error_of_status(status: int, retry_after: str | None) -> DuplexError:
    """Return the error for the status of a refused upgrade and its header `Retry-After`."""
    seconds = float(retry_after) if retry_after and retry_after.strip().isdecimal() else None
    message = f"the server refuses the connection with status {status}"
    if status in (408, 429, 502, 503, 504):
        return BusyError(message, status=status, retry_after_s=seconds)
    kind = ServerError if status >= 500 else RefusedError
    return kind(message, status=status, retry_after_s=seconds)


def retry_wait_s(error: DuplexError, attempt: int, base_s: float = 1.0) -> float | None:
    """Return how long to wait before attempt `attempt + 1`, or None if it is of no use.

    The wait doubles with each attempt, up to 30 s, and half of it is random, so that many clients
    do not return together. It is never shorter than the server asks for.
    """
    asked = error.retry_after_s or 0.0
    if not error.can_retry or asked > MAX_RETRY_AFTER_S:
        return None
    longest = min(MAX_WAIT_S, base_s * 2.0 ** min(attempt, 10))
    return max(asked, longest * random.uniform(0.5, 1.0))
