"""Connections to a server, and sound files, for the verbs that act as a client."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import orjson
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake

from duplane.client import DuplexError, QueuePlace
from duplane.client.connecting import error_of_connecting
from duplane.client.events import queue_place
from duplane.fabric.audio import OUTPUT_RATE_HERTZ, AudioError, Samples, read_audio_file
from duplane.fabric.secret_files import read_secret
from duplane.tools.command import CommandError, UsageError
from duplane.tools.talk.dialects import Message, TalkDialect

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
OPEN_TIMEOUT_S = 10.0  # for the connection and its handshakes


def full_url(url: str, path: str) -> str:
    """Add `path` and its query to a server address that has no path.

    Raises UsageError if `url` is not a WebSocket address.
    """
    parts = urlsplit(url if "://" in url else f"ws://{url}")
    if parts.scheme not in ("ws", "wss"):
        raise UsageError(f"url is {url!r}, must begin with ws:// or wss://")
    bare = urlsplit(path)
    route = parts.path if parts.path not in ("", "/") else bare.path
    return urlunsplit((parts.scheme, parts.netloc, route, parts.query or bare.query, ""))


class ConnectError(CommandError):
    """The WebSocket connection to the server failed; the message says why."""


class TalkError(CommandError):
    """The conversation failed; the message says how."""


def read_key(key_file: Path | None) -> str | None:
    """Return the key or token in a file. Raises UsageError for an unusable file."""
    try:
        return read_secret(key_file, "key_file") if key_file else None
    except ValueError as error:
        raise UsageError(str(error)) from None


def tls_context(url: str, ca: Path | None) -> ssl.SSLContext | None:
    """Return what a `wss:` URL needs: to trust the certificates in `ca`, or the system's.

    Raises ConnectError.
    """
    if urlsplit(url).scheme != "wss":
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConnectError(f"ca: {ca} cannot be used: {error}") from None


@contextlib.asynccontextmanager
async def connected(
    url: str, ca: Path | None = None, key_file: Path | None = None
) -> AsyncGenerator[ClientConnection]:
    """Connect to a server for the body of the `with`, without a proxy.

    `ca` is a file of certificates (PEM) to trust in place of the system's, `key_file` a file with
    the key or token to show. Raises ConnectError, and UsageError for an unusable file of a key.
    """
    key, context = read_key(key_file), tls_context(url, ca)
    try:
        connection = await connect(
            url,
            ssl=context,
            additional_headers={"Authorization": f"Bearer {key}"} if key else None,
            open_timeout=OPEN_TIMEOUT_S,
            max_size=_MAX_MESSAGE_BYTES,
            compression=None,
            proxy=None,
        )
    except (OSError, TimeoutError, InvalidHandshake) as error:
        raise connect_error(
            url,
            error_of_connecting(error, is_tls=context is not None, timeout_s=OPEN_TIMEOUT_S),
        ) from None
    async with connection:
        yield connection


def connect_error(url: str, error: DuplexError) -> ConnectError:
    """Return the error for a connection that the client library could not open."""
    advice = "; see --ca" if "certificate" in error.message else ""
    reason = error.message.removeprefix("no connection: ")
    return ConnectError(f"no connection to {url}: {reason}{advice}")


def error_text(event: Message) -> str:
    """Return the message of an error event, which is an object in A and B, and a text in C and D.

    Any other event is returned as JSON.
    """
    match event.get("error"):
        case str(message) | {"message": str(message)}:
            return message
        case _:
            return orjson.dumps(event).decode()


async def events_of(connection: ClientConnection) -> AsyncGenerator[Message]:
    """Yield the server's events until the connection ends."""
    async for message in connection:
        yield orjson.loads(message)


async def begin(
    connection: ClientConnection,
    dialect: TalkDialect,
    on_queued: Callable[[QueuePlace], None] | None = None,
) -> None:
    """Wait for a slot, send the first message, and wait until units may be sent.

    Raises TalkError if the server refuses the session.
    """
    if dialect.starts_at_once:
        await connection.send(orjson.dumps(dialect.start()), text=True)
    async for event in events_of(connection):
        match str(event.get("type")).removeprefix(dialect.queue_prefix):
            case "queued" | "queue_update":
                if on_queued:
                    on_queued(queue_place(event))
            case "queue_done":
                await connection.send(orjson.dumps(dialect.start()), text=True)
            case _ if event.get("type") == dialect.ready:
                return
            case _:
                raise TalkError(f"the server refuses the session: {error_text(event)}")
    raise TalkError("the connection ended before the session began")


async def end(connection: ClientConnection, dialect: TalkDialect) -> None:
    """Send the message that ends the session, or end the connection."""
    message = dialect.close()
    if message is None:
        await connection.close()
    else:
        await connection.send(orjson.dumps(message), text=True)


def read_sound(file: Path) -> Samples:
    """Return a file's samples at 16 kHz. Raises UsageError naming the file."""
    try:
        return read_audio_file(file)
    except AudioError as error:
        raise UsageError(f"{file} {error}") from None


def check_out(out: Path | None) -> None:
    """Check that `out` can be written. Called before the conversation begins. Raises UsageError."""
    if out is None:
        return
    if out.suffix.lower() != ".wav":
        raise UsageError(f"out is {out}, must end in .wav")
    try:
        out.open("ab").close()
    except OSError as error:
        raise UsageError(f"out: {out} cannot be written: {error.strerror}") from None


def write_sound(out: Path | None, parts: Sequence[Samples]) -> None:
    """Write parts of sound, one after the other, to a file; do nothing if `out` is None."""
    if out:
        soundfile.write(out, np.concatenate([np.zeros(0, "f4"), *parts]), OUTPUT_RATE_HERTZ)
