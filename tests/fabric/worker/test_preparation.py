"""Chats are prepared outside the device thread.

The preparation ends with the session, and does not delay other sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator

from support.time_limits import WITHIN_S
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import Rig, running_worker, unit

from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import lease_pb2, registry_pb2, session_pb2
from duplane.worker.models.chat import ChatRequest

WORD = session_pb2.ChatMessage(
    role=session_pb2.CHAT_ROLE_USER, parts=[session_pb2.ChatPart(text="hi")]
)


class Workshop:
    """Blocks the preparation of chats that have several messages, and counts its steps."""

    def __init__(self, model: ScriptedModel) -> None:
        self.steps = 0
        self._begun = asyncio.Semaphore(0)
        self._gate = threading.Event()
        self._loop = asyncio.get_running_loop()
        model.on_prepare = self._work

    def _work(self, request: ChatRequest) -> None:
        if len(request.messages) == 1:
            return  # a chat of one message is not blocked
        self.steps += 1
        self._loop.call_soon_threadsafe(self._begun.release)
        assert self._gate.wait(2 * WITHIN_S)

    async def begun(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            await self._begun.acquire()

    def let_go(self) -> None:
        self._gate.set()


@contextlib.asynccontextmanager
async def asked(rig: Rig, slot: int, message_count: int) -> AsyncGenerator[asyncio.Task[int]]:
    """Run a client that starts a chat, and yield the task that counts its responses.

    The client disconnects at the end of the `with`.
    """
    granted = rig.grant(slot, kind=lease_pb2.SESSION_KIND_CHAT)
    request = session_pb2.ChatRequest(messages=[WORD] * message_count)

    async def ask() -> int:
        async with (
            FabricClient([rig.scheduler.address]) as client,
            client.chat(granted, request) as responses,
        ):
            return len([response async for response in responses])

    asking = asyncio.create_task(ask())
    try:
        yield asking
    finally:
        asking.cancel()
        await asyncio.wait({asking})


async def test_a_slot_is_free_only_when_nothing_is_prepared_for_it_any_more() -> None:
    async with running_worker() as rig:
        workshop = Workshop(rig.model)
        async with asked(rig, 0, message_count=100):
            await workshop.begun()
        await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_CLEANING)
        # Slot 0 stays CLEANING while a whole chat runs on slot 1: the device has finished with the
        # cancelled chat of slot 0, but the preparation of that chat still runs.
        async with asked(rig, 1, message_count=1) as asking, asyncio.timeout(WITHIN_S):
            assert await asking > 1
        await rig.all_free(1)
        assert rig.scheduler.report.slots[0].state == registry_pb2.SLOT_STATE_CLEANING
        workshop.let_go()
        await rig.all_free(0)
        # The preparation stopped before its second step.
        assert workshop.steps == 1


async def test_what_waits_to_be_prepared_leaves_with_its_client() -> None:
    async with running_worker(ScriptedModel(slot_count=8)) as rig:
        workshop = Workshop(rig.model)
        async with contextlib.AsyncExitStack() as clients:
            for slot in range(2):
                await clients.enter_async_context(asked(rig, slot, message_count=100))
                await workshop.begun()
            for slot in range(2, 8):
                async with asked(rig, slot, message_count=100):
                    await rig.scheduler.until_slot(slot, registry_pb2.SLOT_STATE_OCCUPIED)
            await rig.all_free(*range(2, 8))
        for slot in range(2):
            await rig.scheduler.until_slot(slot, registry_pb2.SLOT_STATE_CLEANING)
        workshop.let_go()
        await rig.all_free()
        assert workshop.steps == 2


async def test_chats_that_are_prepared_keep_no_picture_of_a_conversation_waiting() -> None:
    chats = range(1, 40)
    async with running_worker(ScriptedModel(slot_count=40)) as rig:
        workshop = Workshop(rig.model)
        async with contextlib.AsyncExitStack() as clients:
            granted = rig.grant(0, kind=lease_pb2.SESSION_KIND_OMNI_DUPLEX)
            talker = await clients.enter_async_context(rig.opened(granted))
            for slot in chats:
                await clients.enter_async_context(asked(rig, slot, message_count=2))
                await rig.scheduler.until_slot(slot, registry_pb2.SLOT_STATE_OCCUPIED)
            for sequence in range(3):
                await talker.send(unit(sequence, video_frames=[b"a picture"]))
                assert (await talker.delta()).sequence == sequence
            workshop.let_go()
