"""Many short sessions end at random points in random ways; each slot is free again afterwards."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import Client, Rig, pcm, running_worker, unit

from duplane.fabric.v1 import registry_pb2, session_pb2

Request = session_pb2.ConverseRequest
SLOTS = 4
VISITS = 10


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_clients_do_every_slot_is_free_at_the_end(seed: int) -> None:
    model = ScriptedModel(slot_count=SLOTS)
    async with running_worker(model) as rig, asyncio.TaskGroup() as tasks:
        for slot in range(SLOTS):
            tasks.create_task(visits(rig, slot, random.Random(100 * seed + slot)))


async def visits(rig: Rig, slot: int, dice: random.Random) -> None:
    """Run clients one after the other; each starts when the worker has reported the slot free."""
    for _ in range(VISITS):
        async with rig.call() as client:
            await client.claim(rig.grant(slot))
            if dice.random() < 0.9:
                await talk(client, dice)
            await leave(client, dice)
        await rig.scheduler.until(lambda: is_free_again(rig, slot))


async def talk(client: Client, dice: random.Random) -> None:
    await client.write(Request(open=session_pb2.Open()))
    for sequence in range(dice.randrange(8)):
        audio = dice.choice([pcm(), pcm(0.5), b"", b"123"])
        await client.send(unit(sequence, audio=audio))
        if dice.random() < 0.5:
            await client.read()


async def leave(client: Client, dice: random.Random) -> None:
    match dice.choice(("close", "half-close", "vanish", "break the order", "just go")):
        case "close":
            await client.close()
        case "half-close":
            await client.half_close()
        case "vanish":
            client.vanish()
        case "break the order":
            await client.write(Request(claim=session_pb2.Claim()))


def is_free_again(rig: Rig, slot: int) -> bool:
    report = rig.scheduler.report.slots[slot]
    return (
        report.fencing_number == rig.last_number(slot)
        and report.state == registry_pb2.SLOT_STATE_FREE
    )
