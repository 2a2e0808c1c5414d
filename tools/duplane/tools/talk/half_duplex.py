"""`duplane talk` in half duplex: sends sound at real-time pace, and is silent during answers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.client.events import queue_place
from duplane.fabric.audio import INPUT_RATE_HERTZ, Samples
from duplane.tools.command import UsageError
from duplane.tools.talk.chat import Reply
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
from duplane.tools.talk.duplex import SAMPLE, print_position, show_sample
from duplane.tools.talk.sessions import QUEUE_TIMEOUT_S, base64_of
from duplane.tools.talk.settings import TalkSettings

_PIECE_S = 0.5
_UNHEARD_S = 0.5  # the server ignores the sound of this time after `prepared`
_STOP_TIMEOUT_S = 10.0
_SAMPLE_NOTE = """\
half duplex is a chat, in which the default model of `duplane up` understands no speech: it answers
most of it with "sorry i did not understand"
"""


def listen_to(settings: TalkSettings, *, out: Path | None, as_json: bool) -> None:
    """Run the conversation, print a row per answer and write the sound of the answers.

    Raises UsageError for invalid settings, and TalkError if the conversation fails.
    """
    if settings.frames or settings.videos or settings.texts:
        raise UsageError("dialect H has no pictures, video files or texts")
    check_out(out)
    speech = read_sound(settings.wav or SAMPLE)
    prepare: dict[str, Any] = {"type": "prepare", "system_prompt": settings.prompt}
    if settings.voice:
        prepare["ref_audio_base64"] = base64_of(read_sound(settings.voice))
    if settings.wav is None and not as_json:
        show_sample()
        sys.stderr.write(_SAMPLE_NOTE)
    silence = np.zeros(int(settings.tail_s * INPUT_RATE_HERTZ), np.float32)
    unheard = np.zeros(int(_UNHEARD_S * INPUT_RATE_HERTZ), np.float32)
    conversation = _HalfDuplex(settings, prepare, as_json)
    asyncio.run(conversation.hold(np.concatenate([unheard, speech, silence])))
    write_sound(out, conversation.audio)


class _HalfDuplex:
    """One conversation, and the sound of its answers."""

    def __init__(self, settings: TalkSettings, prepare: dict[str, Any], as_json: bool) -> None:
        self.audio: list[Samples] = []
        self._settings = settings
        self._prepare = prepare
        self._as_json = as_json
        self._reply: Reply | None = None
        self._turn_count = 0
        self._is_quiet = asyncio.Event()  # no answer is due
        self._is_stopped = False

    async def hold(self, sound: Samples) -> None:
        """Send the sound and receive the answers."""
        url = full_url(self._settings.url, f"/ws/half_duplex/hdx_{secrets.token_hex(6)}")
        try:
            async with connected(url, self._settings.ca, self._settings.key_file) as connection:
                events = self._events(connection)
                await _send(connection, self._prepare)
                async with asyncio.timeout(QUEUE_TIMEOUT_S):
                    await _until(events, "prepared")
                receiver = asyncio.create_task(self._receive(events))
                speaker = asyncio.create_task(self._speak(connection, sound))
                both = {receiver, speaker}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                speaker.cancel()
                await asyncio.wait({speaker})
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await receiver
        except TimeoutError:
            raise TalkError("the server does not answer") from None
        except ConnectionClosed as error:
            raise TalkError(f"the connection ended early: {error}") from None
        if not self._is_stopped:
            raise TalkError("the server did not close the session in order")

    async def _speak(self, connection: ClientConnection, sound: Samples) -> None:
        """Send the sound like a microphone that is switched off during answers."""
        size = int(_PIECE_S * INPUT_RATE_HERTZ)
        self._is_quiet.set()
        with contextlib.suppress(ConnectionClosed):  # the receiver reports the reason
            for at in range(0, sound.size, size):
                await asyncio.sleep(_PIECE_S)
                await self._is_quiet.wait()
                piece = {"type": "audio_chunk", "audio_base64": base64_of(sound[at : at + size])}
                await _send(connection, piece)
            await asyncio.sleep(_PIECE_S)  # for the answer to the last piece to begin
            await self._is_quiet.wait()
            await _send(connection, {"type": "stop"})

    async def _events(self, connection: ClientConnection) -> AsyncGenerator[dict[str, Any]]:
        async for event in events_of(connection):
            if event.get("type") == "error":
                raise TalkError(error_text(event))
            if "position" in event:
                print_position(queue_place(event))
            yield event

    async def _receive(self, events: AsyncGenerator[dict[str, Any]]) -> None:
        try:
            async for event in events:
                self._take(event)
        finally:
            self._is_quiet.set()

    def _take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "queued":  # the answer waits for a slot
                self._is_quiet.clear()
            case "generating":
                self._is_quiet.clear()
                self._reply = Reply(self._turn_count)
            case "chunk" if self._reply:
                text, audio = event.get("text_delta"), event.get("audio_data")
                self._reply.add(text, audio, is_shown=not self._as_json)
            case "turn_done" if self._reply:
                self._reply.show(as_json=self._as_json)
                self.audio += self._reply.audio
                self._reply = None
                self._turn_count += 1
                self._is_quiet.set()
            case "stopped":
                self._is_stopped = True
            case "timeout":
                raise TalkError("the server heard nothing for too long")
            case _:
                pass


async def _send(connection: ClientConnection, message: dict[str, Any]) -> None:
    await connection.send(orjson.dumps(message), text=True)


async def _until(events: AsyncGenerator[dict[str, Any]], kind: str) -> None:
    async for event in events:
        if event["type"] == kind:
            return
    raise TalkError(f"the connection ended without {kind}")
