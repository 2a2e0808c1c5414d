"""Fabrics in which processes of this release and of the former release serve the same call.

The call moves from one worker to another, so that each release reads what the other has written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.fabric.mixed_fabric import MixedFabric, Server, former_environment
from support.fabric.real_fabric import Client
from support.model.blind import blind_checkpoint
from websockets.asyncio.client import connect

UNITS = 5  # before and after each move


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return former_environment(tmp_path_factory.mktemp("former"))


async def hold_call(client: Client) -> None:
    for _ in range(UNITS):
        await client.exchange()


@pytest.mark.parametrize("is_reverse", [False, True], ids=["one former", "all former but one"])
@pytest.mark.parametrize("role", ["scheduler", "edge", "worker"])
async def test_call_moves_between_workers(
    former: Mapping[str, str], role: str, tmp_path: Path, *, is_reverse: bool
) -> None:
    """Only the process of `role` is of the former release; with `is_reverse`, all others are.

    The former release does not load the vision tower of the default model.
    """

    def is_former(name: str) -> bool:
        return (name == role) != is_reverse

    checkpoint = str(blind_checkpoint(tmp_path)) if role == "worker" else "scripted"
    async with MixedFabric.starting(former) as fabric:
        scheduler = await fabric.start("scheduler", is_former=is_former("scheduler"))

        async def start_worker(name: str) -> Server:
            return await fabric.start_worker(scheduler, checkpoint, is_former=is_former(name))

        at = ("--scheduler", scheduler.address)
        worker, edge = await asyncio.gather(
            start_worker("worker"), fabric.start("edge", *at, is_former=is_former("edge"))
        )
        url = f"ws://{edge.address}/v1/realtime?mode=audio"
        async with connect(url, proxy=None, max_size=None) as connection:
            client = Client(connection)
            await client.begin()
            for name in ("next worker", "worker"):  # there and back
                next_worker, _ = await asyncio.gather(start_worker(name), hold_call(client))
                await worker.kill()
                await hold_call(client)
                worker = next_worker
            await client.end()
