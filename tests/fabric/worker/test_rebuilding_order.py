"""The order in which a worker with a scripted model rebuilds several conversations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from support.time_limits import WITHIN_S
from support.worker.rebuild_messages import past, rebuild, rebuilt
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import running_worker, unit

from duplane.fabric.v1 import session_pb2
from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.models.scripted.model import REBUILT_UNITS
from duplane.worker.models.types import PastUnit, Rebuilt, UnitFailure

SEEDED = session_pb2.Open(seed=3)


async def test_neighbours_wait_for_at_most_one_share_of_a_rebuild(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A unit that arrives during a call of `rebuild` runs before the next call."""
    model = ScriptedModel(slot_count=3)
    calls: list[int] = []
    loop, entered = asyncio.get_running_loop(), asyncio.Event()
    has_arrived = threading.Event()
    waiting = asyncio.Semaphore(0)  # conversations that wait to be rebuilt
    begin = DeviceThread.rebuild

    def noted(
        thread: DeviceThread, channel: SlotChannel, units: Sequence[PastUnit], *, has_more: bool
    ) -> None:
        begin(thread, channel, units, has_more=has_more)
        waiting.release()

    monkeypatch.setattr(DeviceThread, "rebuild", noted)
    async with (
        running_worker(model) as rig,
        rig.opened(rig.grant(0)) as neighbour,
        rig.opened(rig.grant(2), SEEDED) as first,
        rig.opened(rig.grant(1), SEEDED) as second,
    ):
        take = model.rebuild

        def watched(slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
            calls.append(slot)
            model.order.append("rebuild")
            if len(calls) == 3:
                loop.call_soon_threadsafe(entered.set)
                assert has_arrived.wait(WITHIN_S)
            return take(slot, units)

        model.rebuild = watched
        model.hold()
        await neighbour.send(unit(0))
        await model.held()
        count = 10 * REBUILT_UNITS
        for client in (first, second):
            await client.write(rebuild(*(past(n) for n in range(count))))
            async with asyncio.timeout(WITHIN_S):
                await waiting.acquire()
        for sequence in range(1, 5):
            await neighbour.send(unit(sequence))
        await rig.received(5)
        model.order.clear()
        model.let_go()
        async with asyncio.timeout(WITHIN_S):
            await entered.wait()
        await neighbour.send(unit(5))
        await rig.received(6)
        has_arrived.set()
        for sequence in range(6):
            assert (await neighbour.delta()).sequence == sequence
        await rebuilt(first)
        await rebuilt(second)
    assert calls == [2] * 10 + [1] * 10
    assert model.order == ["units"] * 4 + ["rebuild"] * 3 + ["units"] + ["rebuild"] * 17


async def test_conversation_keeps_its_place_until_its_last_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ScriptedModel(slot_count=3)
    calls: list[int] = []
    queued: list[int] = []
    loop, entered = asyncio.get_running_loop(), asyncio.Event()
    has_last = threading.Event()  # the first conversation's last message is queued
    begin = DeviceThread.rebuild

    def noted(
        thread: DeviceThread, channel: SlotChannel, units: Sequence[PastUnit], *, has_more: bool
    ) -> None:
        begin(thread, channel, units, has_more=has_more)
        queued.append(channel.slot)
        if queued.count(2) == 2:
            has_last.set()

    monkeypatch.setattr(DeviceThread, "rebuild", noted)
    async with (
        running_worker(model) as rig,
        rig.opened(rig.grant(2), SEEDED) as first,
        rig.opened(rig.grant(1), SEEDED) as second,
    ):
        take = model.rebuild

        def watched(slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
            calls.append(slot)
            if slot == 1:
                loop.call_soon_threadsafe(entered.set)
                assert has_last.wait(WITHIN_S)
            return take(slot, units)

        model.rebuild = watched
        half = [past(n) for n in range(5 * REBUILT_UNITS)]
        rest = [past(n) for n in range(5 * REBUILT_UNITS, 10 * REBUILT_UNITS)]
        await first.write(rebuild(*half, is_last=False))
        await rebuilt(first)
        await second.write(rebuild(*half))
        async with asyncio.timeout(WITHIN_S):
            await entered.wait()
        await first.write(rebuild(*rest))
        await rebuilt(first)
        await rebuilt(second)
    assert calls == [2] * 5 + [1] + [2] * 5 + [1] * 4
