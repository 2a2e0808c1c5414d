"""Sessions whose copies a worker keeps, and edges that ask for these."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio
import pytest
from support.time_limits import WITHIN_S
from support.worker.worker_harness import Client, Rig, unit

from duplane.fabric.channel import open_channel
from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError, from_rpc
from duplane.fabric.v1 import lease_pb2, registry_pb2, session_pb2, session_pb2_grpc

SECRET = "a secret of 256 bits"
SETTINGS = session_pb2.Open(seed=3, system_prompt="hello")
OCCUPIED = registry_pb2.SLOT_STATE_OCCUPIED
LONG_S = 600.0


def keep(*, hold_s: float = LONG_S, within_s: float = LONG_S, **fields: Any) -> session_pb2.Keep:
    digest = hashlib.sha256(SECRET.encode()).digest()
    return session_pb2.Keep(
        **{
            "token_sha256": digest,
            "hold": to_duration(hold_s),
            "within": to_duration(within_s),
            "granted": lease_pb2.Granted(ticket_id="q_1"),
            **fields,
        }
    )


def attach(session_id: str = "s", secret: str = SECRET, **fields: Any) -> session_pb2.Attach:
    return session_pb2.Attach(session_id=session_id, token_secret=secret, **fields)


@contextlib.asynccontextmanager
async def kept(
    rig: Rig, kept_as: session_pb2.Keep | None = None, slot: int = 0, session_id: str = "s"
) -> AsyncGenerator[Client]:
    """Open a session with a copy."""
    async with rig.opened(rig.grant(slot, session_id=session_id), SETTINGS) as client:
        await client.write(session_pb2.ConverseRequest(keep=kept_as or keep()))
        await occupied(rig, slot)
        yield client


async def left_copy(rig: Rig, unit_count: int = 1) -> None:
    """Leave the copy of a session with so many units, whose slot is free again."""
    async with kept(rig, keep(hold_s=0.0)) as client:
        for sequence in range(unit_count):
            await say(client, sequence)
    await rig.all_free()


async def occupied(rig: Rig, slot: int = 0) -> None:
    """Wait until the worker has reported that a slot is occupied."""
    await rig.scheduler.until(lambda: rig.scheduler.report.slots[slot].state == OCCUPIED)


@contextlib.asynccontextmanager
async def attached(rig: Rig, **fields: Any) -> AsyncGenerator[Client]:
    async with rig.call() as client:
        await client.write(session_pb2.ConverseRequest(attach=attach(**fields)))
        yield client


async def say(client: Client, sequence: int, **fields: Any) -> session_pb2.Delta:
    await client.send(unit(sequence, 0.5, **fields))
    return await client.delta()


async def read_copy(
    client: Client,
) -> tuple[session_pb2.Attached, list[session_pb2.Delta], list[session_pb2.PastUnit]]:
    """Read what a worker sends to an edge that has attached."""
    first = await client.read()
    assert first.HasField("attached"), first
    deltas = list[session_pb2.Delta]()
    past_units = list[session_pb2.PastUnit]()
    while True:
        response = await client.read()
        if response.HasField("delta"):
            deltas.append(response.delta)
            continue
        past_units += response.kept.units
        if response.kept.is_last:
            return first.attached, deltas, past_units


@contextlib.asynccontextmanager
async def taking_over(
    rig: Rig, *, is_done: bool = False, **fields: Any
) -> AsyncGenerator[list[session_pb2.TakeOverResponse]]:
    """Take a copy, and hold it until the end of the body. Raises FabricError."""
    async with open_channel(rig.address) as channel:
        stub: session_pb2_grpc.SessionServiceAsyncStub = session_pb2_grpc.SessionServiceStub(
            channel
        )
        call = stub.TakeOver()
        responses = list[session_pb2.TakeOverResponse]()
        try:
            async with asyncio.timeout(WITHIN_S):
                await call.write(session_pb2.TakeOverRequest(attach=attach(**fields)))
                while not (responses and responses[-1].kept.is_last):
                    response = await call.read()
                    assert isinstance(response, session_pb2.TakeOverResponse), await call.code()
                    responses.append(response)
            yield responses
            if is_done:
                async with asyncio.timeout(WITHIN_S):
                    await call.write(session_pb2.TakeOverRequest(is_done=True))
                    assert await call.read() is grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()


async def taken_over(rig: Rig, **fields: Any) -> list[session_pb2.TakeOverResponse]:
    """Take a copy, which the worker then deletes. Raises FabricError."""
    async with taking_over(rig, is_done=True, **fields) as responses:
        return responses


async def refused(rig: Rig, **fields: Any) -> FabricError:
    async with attached(rig, **fields) as client:
        return await client.refused()


async def refused_take_over(rig: Rig, **fields: Any) -> FabricError:
    with pytest.raises(FabricError) as refusal:
        await taken_over(rig, **fields)
    return refusal.value
