"""`duplane talk` in chats: one turn per text.

Dialect B uses one connection for all turns, dialect D a new connection for each turn.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.client.events import queue_place
from duplane.fabric.audio import OUTPUT_RATE_HERTZ, Samples
from duplane.tools.command import UsageError
from duplane.tools.talk.client import (
    TalkError,
    check_out,
    connected,
    error_text,
    events_of,
    full_url,
    read_sound,
    write_sound,
)
from duplane.tools.talk.duplex import print_position
from duplane.tools.talk.sessions import QUEUE_TIMEOUT_S, base64_of
from duplane.tools.talk.settings import TalkSettings

Message = dict[str, Any]
_QUEUE = ("queued", "queue_update", "queue_done")


@dataclass
class Reply:
    """The answer of one turn, as it is printed."""

    turn: int
    text: str = ""
    audio: list[Samples] = field(default_factory=list[Samples])
    first_ms: float | None = None
    began_s: float = field(default_factory=time.monotonic)

    def add(self, text: str | None, audio: str | None, *, is_shown: bool) -> None:
        if (text or audio) and self.first_ms is None:
            self.first_ms = round((time.monotonic() - self.began_s) * 1000, 1)
        if text:
            self.text += text
            if is_shown:
                sys.stdout.write(text)
                sys.stdout.flush()
        if audio:
            self.audio.append(np.frombuffer(pybase64.b64decode(audio, validate=True), "<f4"))

    def show(self, *, as_json: bool) -> None:
        row = {
            "turn": self.turn,
            "text": self.text,
            "audio_s": round(sum(piece.size for piece in self.audio) / OUTPUT_RATE_HERTZ, 3),
            "first_ms": self.first_ms,
            "total_ms": round((time.monotonic() - self.began_s) * 1000, 1),
        }
        sys.stdout.write((orjson.dumps(row).decode() if as_json else "") + "\n")
        if not as_json:
            sys.stderr.write(
                f"turn {self.turn}: first after {self.first_ms} ms, all after {row['total_ms']} ms,"
                f" {row['audio_s']} s of speech\n"
            )


def chat_with(settings: TalkSettings, *, out: Path | None, as_json: bool) -> None:
    """Run the chat, print its answers and write their sound.

    Raises UsageError for invalid settings, and TalkError if the chat fails.
    """
    if settings.dialect not in ("B", "D"):
        raise UsageError(f"dialect {settings.dialect} has no chats: use --dialect B or --dialect D")
    if not settings.texts:
        raise UsageError("a chat needs a text: --text 'Hello'")
    check_out(out)
    parts: list[Message] = [
        {"type": kind, "data": data}
        for kind, files in (("image", settings.frames), ("video", settings.videos))
        for data in _read_files(files)
    ]
    if settings.wav:
        parts.append({"type": "audio", "data": base64_of(read_sound(settings.wav))})
    tts: Message = {"enabled": out is not None or settings.voice is not None}
    if settings.voice:
        tts["ref_audio_data"] = base64_of(read_sound(settings.voice))
    history: list[Message] = [{"role": "system", "content": settings.prompt}]
    chat = _Chat(settings, history, parts, tts, as_json)
    asyncio.run(chat.hold())
    write_sound(out, chat.audio)


def _read_files(files: Iterable[Path]) -> list[str]:
    try:
        return [pybase64.b64encode_as_string(file.read_bytes()) for file in files]
    except OSError as error:
        raise UsageError(str(error)) from None


class _Chat:
    """One chat, its history, and the sound of its answers. `parts` are sent with the first text."""

    def __init__(
        self,
        settings: TalkSettings,
        history: list[Message],
        parts: list[Message],
        tts: Message,
        as_json: bool,
    ) -> None:
        self.audio: list[Samples] = []
        self._settings = settings
        self._history = history
        self._parts = parts
        self._tts = tts
        self._as_json = as_json

    async def hold(self) -> None:
        """Send every text and receive every answer."""
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                await (self._hold_b() if self._settings.dialect == "B" else self._hold_d())
        except TimeoutError:
            raise TalkError("the server does not answer") from None
        except ConnectionClosed as error:
            raise TalkError(f"the connection ended early: {error}") from None

    def _request(self, text: str) -> Message:
        content = [*self._parts, {"type": "text", "text": text}] if self._parts else text
        self._parts = []
        self._history.append({"role": "user", "content": content})
        return {"messages": self._history, "streaming": True, "tts": self._tts}

    def _finish(self, reply: Reply) -> None:
        reply.show(as_json=self._as_json)
        self._history.append({"role": "assistant", "content": reply.text})
        self.audio += reply.audio

    async def _hold_d(self) -> None:
        for number, text in enumerate(self._settings.texts):
            url = full_url(self._settings.url, "/ws/chat")
            async with connected(url, self._settings.ca, self._settings.key_file) as connection:
                await _send(connection, self._request(text))
                reply = Reply(number)
                async for event in _events(connection, ""):
                    if event["type"] == "chunk":
                        text_delta, audio = event.get("text_delta"), event.get("audio_data")
                        reply.add(text_delta, audio, is_shown=not self._as_json)
                    if event["type"] == "done":
                        break
                else:
                    raise TalkError("the connection ended before the answer")
                self._finish(reply)

    async def _hold_b(self) -> None:
        url = full_url(self._settings.url, "/v1/realtime?mode=chat")
        async with connected(url, self._settings.ca, self._settings.key_file) as connection:
            await _send(connection, {"type": "session.init", "payload": {}})
            events = _events(connection, "session.")
            await _until(events, "session.created")
            for number, text in enumerate(self._settings.texts):
                request = self._request(text) | {"input_id": str(number)}
                await _send(connection, {"type": "input.append", "input": request})
                reply = Reply(number)
                async for event in events:
                    if event["type"] == "response.done":
                        break
                    reply.add(event.get("text"), event.get("audio"), is_shown=not self._as_json)
                else:
                    raise TalkError("the connection ended before the answer")
                self._finish(reply)
            await _send(connection, {"type": "session.close", "reason": "turn_done"})
            await _until(events, "session.closed")


async def _send(connection: ClientConnection, message: Message) -> None:
    await connection.send(orjson.dumps(message), text=True)


async def _events(connection: ClientConnection, queue_prefix: str) -> AsyncGenerator[Message]:
    """Yield the events of the chat; print the position in the queue."""
    async for event in events_of(connection):
        kind = str(event.get("type"))
        if kind == "error":
            raise TalkError(error_text(event))
        if kind.removeprefix(queue_prefix) not in _QUEUE:
            yield event
        elif "position" in event:
            print_position(queue_place(event))


async def _until(events: AsyncGenerator[Message], kind: str) -> None:
    async for event in events:
        if event["type"] == kind:
            return
    raise TalkError(f"the connection ended without {kind}")
