"""A scheduler that tells of a large fabric, and has none: it serves AdminService.Watch only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from support.scheduler.scripted_watch import serve_watch

from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2

SLOT_COUNT = 8
_PART = 50  # workers in one message of a snapshot
_AUDIO = lease_pb2.SESSION_KIND_AUDIO_DUPLEX


def _worker(number: int) -> admin_pb2.WorkerStatus:
    first = number * SLOT_COUNT
    slots = [
        registry_pb2.SlotReport(
            slot=slot,
            state=registry_pb2.SLOT_STATE_OCCUPIED,
            lease_id=f"lease-{first + slot}",
            session_id=f"sess_{first + slot:012d}",
            kind=_AUDIO,
        )
        for slot in range(SLOT_COUNT)
    ]
    return admin_pb2.WorkerStatus(
        worker=registry_pb2.Register(worker_id=f"worker-{number:04d}", slots=slots)
    )


def _lease(number: int) -> admin_pb2.LeaseStatus:
    claims = lease_pb2.LeaseClaims(
        lease_id=f"lease-{number}",
        worker_id=f"worker-{number // SLOT_COUNT:04d}",
        slot=number % SLOT_COUNT,
        session_id=f"sess_{number:012d}",
        kind=_AUDIO,
    )
    return admin_pb2.LeaseStatus(claims=claims, is_claimed=True)


@contextlib.asynccontextmanager
async def large_fabric(worker_count: int) -> AsyncGenerator[str]:
    """Tell of workers without free slots; yield the address of the scheduler."""

    async def watch(request: bytes, _: object) -> AsyncIterator[bytes]:
        for first in range(0, worker_count, _PART):
            last = min(first + _PART, worker_count)
            part = admin_pb2.Snapshot(
                workers=[_worker(one) for one in range(first, last)],
                leases=[_lease(one) for one in range(first * SLOT_COUNT, last * SLOT_COUNT)],
                has_more=last < worker_count,
            )
            yield admin_pb2.WatchResponse(snapshot=part).SerializeToString()
        await asyncio.Event().wait()

    async with serve_watch(watch) as address:
        yield address
