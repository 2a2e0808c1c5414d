"""Opening the connection: its address, its credential, and why there is none."""

from __future__ import annotations

import ssl
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidProxy,
    InvalidStatus,
    InvalidURI,
)
from websockets.frames import CloseCode

from duplane.client.errors import (
    ConnectionLostError,
    DuplexError,
    RefusedError,
    ServerError,
    error_of_close,
    error_of_status,
)

_PATH = "/v1/realtime"
_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""A longer message of the server ends the session."""
_CLOSE_S = 2.0  # for the last frames of the WebSocket
_PING_S = 20.0


def full_url(url: str, mode: str, model: str | None) -> str:
    """Return the address of a session; `mode` and `model` replace those of `url`.

    Raises ValueError.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or not parts.netloc:
        raise ValueError(f"url is {url!r}, must be ws://HOST:PORT or wss://HOST")
    path = _PATH if parts.path in ("", "/") else parts.path
    own = {"mode": mode} | ({"model": model} if model else {})
    given = parse_qsl(parts.query, keep_blank_values=True)
    query = urlencode([*(pair for pair in given if pair[0] not in own), *own.items()])
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, query, ""))


def headers(key: str | None) -> dict[str, str] | None:
    """Return the headers that show a key. Raises ValueError, without the key in its message."""
    if not key:
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("key must have visible ASCII characters only; does it end in a newline?")
    return {"Authorization": f"Bearer {key}"}


async def opened(
    url: str,
    headers: dict[str, str] | None,
    tls: ssl.SSLContext | None,
    *,
    proxy: str | bool,
    timeout_s: float,
    ping_s: float | None = None,
) -> ClientConnection:
    """Open the connection. It is lost if no answer to a ping comes within `ping_s`.

    Raises DuplexError.
    """
    try:
        return await connect(
            url,
            ssl=tls,
            additional_headers=headers,
            compression=None,
            proxy=proxy or None,
            open_timeout=timeout_s,
            close_timeout=_CLOSE_S,
            ping_interval=ping_s or _PING_S,
            ping_timeout=ping_s or _PING_S,
            max_size=MAX_MESSAGE_BYTES,
        )
    except (InvalidURI, InvalidProxy) as error:
        raise RefusedError(str(error)) from None
    except InvalidStatus as error:
        answer = error.response
        raise error_of_status(answer.status_code, answer.headers.get("Retry-After")) from None
    except (OSError, TimeoutError, InvalidHandshake) as error:
        is_tls = url.startswith("wss:")
        raise error_of_connecting(error, is_tls=is_tls, timeout_s=timeout_s) from None


def error_of_connecting(error: Exception, *, is_tls: bool, timeout_s: float) -> DuplexError:
    """Return the error for a connection that could not be opened, with advice."""
    match error:
        case ssl.SSLCertVerificationError():
            return RefusedError(f"its certificate is not trusted ({error.verify_message})")
        case ssl.SSLError():
            reason = "the server does not speak TLS on this port; try ws://"
        case InvalidMessage() if not is_tls:
            reason = "the server does not answer in HTTP; if it serves TLS, try wss://"
        case TimeoutError():
            reason = f"the server does not answer within {timeout_s:g} s"
        case _:
            reason = str(error)
    return ConnectionLostError(f"no connection: {reason}")


def error_of_closed(closed: ConnectionClosed, refusal: DuplexError | None) -> DuplexError:
    """Return the error for a connection that is closed, for which `refusal` may give the reason."""
    if closed.sent and not closed.rcvd and closed.sent.code == CloseCode.MESSAGE_TOO_BIG:
        return ServerError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")
    code, text = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (1006, "")
    if closed.sent and not closed.rcvd:
        text = closed.sent.reason  # for example, that no answer to a ping came
    if refusal is None:
        return error_of_close(code, text)
    return error_of_close(code, refusal.message, refusal.code)


async def close_socket(socket: ClientConnection) -> None:
    """Close the connection; if the caller is cancelled meanwhile, at once."""
    try:
        await socket.close()
    finally:
        socket.transport.abort()
