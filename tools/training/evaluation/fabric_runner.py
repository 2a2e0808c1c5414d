"""Runs conversations through a fabric, as a client of its edge.

Duplex sessions use dialect B, which has a field for the seed; chats use dialect D. A session sends
its next unit after the first event about the unit before, so that no unit is dropped. At a pace it
also waits until the unit is due. A unit that is answered after the next one is due is late: the
session goes on later, so that its results do not depend on the load of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import orjson
import pybase64
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.tools.talk.client import TalkError, connected, events_of, full_url
from duplane.tools.talk.dialects import Message, UnitReply
from duplane.tools.talk.sessions import Wish, begun
from duplane.tools.up.fabric import UpSettings, running
from duplane.worker.models.minicpm_o.audio.mel import UNIT_SAMPLES
from training.evaluation.inputs import ChatInput, SessionInput
from training.evaluation.scores import Answered

_REPLY_TIMEOUT_S = 60.0  # for a slot, for each reply to a unit, and for a whole chat

_Input = TypeVar("_Input")
_Result = TypeVar("_Result")


class FabricRunner:
    """A `Runner` for an edge at `url`, with `slot_count` conversations at the same time.

    `pace_s` is the time between two units of a session: a second is real time, and without a pace
    they follow each other at once. `late_units` counts the late units. The methods raise TalkError,
    in a group, if a conversation fails.
    """

    def __init__(self, url: str, slot_count: int, pace_s: float = 0.0) -> None:
        self._url = url
        self._free = asyncio.Semaphore(slot_count)
        self._pace_s = pace_s
        self.late_units = 0

    async def sessions(self, inputs: Sequence[SessionInput]) -> list[list[Answered]]:
        """Return the outputs of all units of each session."""
        return await self._run(self._converse, inputs)

    async def _converse(self, url: str, given: SessionInput) -> list[Answered]:
        answered, late = await _converse(url, given, self._pace_s)
        self.late_units += late
        return answered

    async def chats(self, inputs: Sequence[ChatInput]) -> list[str]:
        """Return the text of each answer. Dialect D has no seed, so the answers can vary."""
        return await self._run(_chat, inputs)

    async def _run(
        self, call: Callable[[str, _Input], Awaitable[_Result]], inputs: Sequence[_Input]
    ) -> list[_Result]:
        async def run(one: _Input) -> _Result:
            async with self._free:
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
async def fabric_runner(
    directory: Path, slot_count: int, pace_s: float = 0.0
) -> AsyncGenerator[FabricRunner]:
    """Start a fabric that serves a checkpoint, for the body of the `with`.

    Raises StartError, and RoleError in a group.
    """
    settings = UpSettings(port=0, slot_count=slot_count, checkpoint=directory, log_level="WARNING")
    async with running(settings) as fabric:
        yield FabricRunner(f"ws://{fabric.edge}", slot_count, pace_s)


async def _converse(url: str, given: SessionInput, pace_s: float) -> tuple[list[Answered], int]:
    """Return the outputs of all units of a session, and the number of its late units."""
    units = given.samples.reshape(-1, UNIT_SAMPLES)
    answered = [Answered(speaks=False)] * len(units)
    wish = Wish(
        url=url,
        dialect="B",
        mode="video" if given.pictures else "audio",
        prompt=given.prompt,
        voice=given.voice,
        seed=given.seed,
    )
    loop = asyncio.get_running_loop()
    late = newest = 0
    try:
        async with asyncio.timeout(_REPLY_TIMEOUT_S) as limit, begun(wish) as session:
            due = loop.time()
            await session.send(newest, units[newest], given.frames(newest))
            async for reply in session.replies():
                limit.reschedule(loop.time() + _REPLY_TIMEOUT_S)
                answered[reply.unit] = _joined(answered[reply.unit], reply)
                if reply.unit != newest:
                    continue
                newest += 1
                due += pace_s
                wait_s = due - loop.time()
                if pace_s and wait_s < 0:
                    late += 1
                    due -= wait_s
                await asyncio.sleep(max(0.0, wait_s))
                if newest < len(units):
                    await session.send(newest, units[newest], given.frames(newest))
                else:
                    await session.close()
    except TalkError as error:
        raise TalkError(f"after {newest} of {len(units)} units: {error}") from None
    if newest < len(units):
        raise TalkError(f"the session ended after {newest} of {len(units)} units")
    return answered, late


def _joined(before: Answered, reply: UnitReply) -> Answered:
    """Add an event of dialect B to the output of its unit."""
    return Answered(
        speaks=before.speaks or reply.is_speech,
        text=before.text + reply.text,
        ends_turn=before.ends_turn or reply.end_of_turn,
    )


async def _chat(url: str, given: ChatInput) -> str:
    messages: list[Message] = [{"role": role, "content": text} for role, text in given.messages]
    if given.picture is not None:
        image = {"type": "image", "data": pybase64.b64encode_as_string(given.picture)}
        text = {"type": "text", "text": given.messages[-1][1]}
        messages[-1]["content"] = [image, text]
    request: Message = {
        "messages": messages,
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
