"""Runs conversations through a fabric, as a client of its edge.

Duplex sessions use dialect B, which has a field for the seed; chats use dialect D. A session sends
its next unit as soon as the first event about the unit before arrives, so that no unit is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import orjson
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.tools.talk.client import TalkError, begin, connected, events_of, full_url
from duplane.tools.talk.dialects import DialectB, Message, UnitReply
from duplane.tools.talk.duplex import base64_of
from duplane.tools.up.fabric import UpSettings, running
from duplane.worker.models.minicpm_o.audio.mel import UNIT_SAMPLES
from training.evaluation.inputs import ChatInput, SessionInput
from training.evaluation.scores import Answered

_REPLY_TIMEOUT_S = 60.0  # for a slot, for each reply to a unit, and for a whole chat

_Input = TypeVar("_Input")
_Result = TypeVar("_Result")


class FabricRunner:
    """A `Runner` for an edge at `url`, with `slot_count` conversations at the same time.

    Its methods raise TalkError, in a group, if a conversation fails.
    """

    def __init__(self, url: str, slot_count: int) -> None:
        self._url = url
        self._slot_count = slot_count

    async def sessions(self, inputs: Sequence[SessionInput]) -> list[list[Answered]]:
        """Return the outputs of all units of each session."""
        return await self._run(_converse, inputs)

    async def chats(self, inputs: Sequence[ChatInput]) -> list[str]:
        """Return the text of each answer. Dialect D has no seed, so the answers can vary."""
        return await self._run(_chat, inputs)

    async def _run(
        self, call: Callable[[str, _Input], Awaitable[_Result]], inputs: Sequence[_Input]
    ) -> list[_Result]:
        free = asyncio.Semaphore(self._slot_count)

        async def run(one: _Input) -> _Result:
            async with free:
                try:
                    return await call(self._url, one)
                except TimeoutError:
                    raise TalkError(f"no answer in {_REPLY_TIMEOUT_S:g} s") from None
                except ConnectionClosed as error:
                    raise TalkError(f"the connection ended early: {error}") from None

        async with asyncio.TaskGroup() as tasks:
            results = [tasks.create_task(run(one)) for one in inputs]
        return [result.result() for result in results]


@contextlib.asynccontextmanager
async def fabric_runner(directory: Path, slot_count: int) -> AsyncGenerator[FabricRunner]:
    """Start a fabric that serves a checkpoint, for the body of the `with`.

    Raises StartError, and RoleError in a group.
    """
    settings = UpSettings(port=0, slot_count=slot_count, checkpoint=directory, log_level="WARNING")
    async with running(settings) as fabric:
        yield FabricRunner(f"ws://{fabric.edge}", slot_count)


async def _converse(url: str, given: SessionInput) -> list[Answered]:
    voice = None if given.voice is None else base64_of(given.voice)
    dialect = DialectB(given.prompt, voice, given.seed)
    units = given.samples.reshape(-1, UNIT_SAMPLES)
    messages = [dialect.unit(number, base64_of(unit), []) for number, unit in enumerate(units)]
    messages.append(dialect.close())
    answered = [Answered(speaks=False)] * len(units)
    async with (
        asyncio.timeout(_REPLY_TIMEOUT_S) as limit,
        connected(full_url(url, dialect.path("audio"))) as connection,
    ):
        await begin(connection, dialect)
        newest = 0
        await _send(connection, messages[newest])
        async for reply in _replies(connection, dialect):
            limit.reschedule(asyncio.get_running_loop().time() + _REPLY_TIMEOUT_S)
            answered[reply.unit] = _joined(answered[reply.unit], reply)
            if reply.unit == newest:
                newest += 1
                await _send(connection, messages[newest])
    if newest < len(units):
        raise TalkError(f"the session ended after {newest} of {len(units)} units")
    return answered


def _joined(before: Answered, reply: UnitReply) -> Answered:
    """Add an event of dialect B to the output of its unit."""
    return Answered(
        speaks=before.speaks or reply.is_speech,
        text=before.text + reply.text,
        ends_turn=before.ends_turn or reply.end_of_turn,
    )


async def _replies(connection: ClientConnection, dialect: DialectB) -> AsyncGenerator[UnitReply]:
    """Yield the replies until the session ends."""
    async for event in events_of(connection):
        if event["type"] == "error":
            raise TalkError(orjson.dumps(event.get("error")).decode())
        if event["type"] in dialect.ended:
            return
        for reply in dialect.replies(event):
            yield reply


async def _chat(url: str, given: ChatInput) -> str:
    request: Message = {
        "messages": [{"role": role, "content": text} for role, text in given.messages],
        "streaming": False,
        "tts": {"enabled": given.is_spoken},
    }
    async with (
        asyncio.timeout(_REPLY_TIMEOUT_S),
        connected(full_url(url, "/ws/chat")) as connection,
    ):
        await _send(connection, request)
        async for event in events_of(connection):
            if event["type"] == "error":
                raise TalkError(str(event.get("error")))
            if event["type"] == "done":
                return event["text"]
    raise TalkError("the connection ended before the answer")


async def _send(connection: ClientConnection, message: Message) -> None:
    await connection.send(orjson.dumps(message), text=True)
