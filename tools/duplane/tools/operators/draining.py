"""Drains a worker, waits until it has no session, and takes a drain back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc, registry_pb2
from duplane.tools.command import CommandError
from duplane.tools.operators.snapshots import TIMEOUT_S, merge, read_fabric

_Answer = TypeVar("_Answer")

_INTERVAL_S = 0.5  # between two looks at the worker
# A scheduler that restarts does not answer, and then its workers are not attached for a moment. So
# a command fails only if no scheduler answers, or the worker is not attached, for these times.
_SILENT_S = 15.0
_DETACHED_S = 5.0
_UNDRAIN_TIMEOUT_S = 5.0  # in which a worker that takes its drain back reports so
_HELD = (registry_pb2.SLOT_STATE_OCCUPIED, registry_pb2.SLOT_STATE_CLEANING)


class _Fabric(NamedTuple):
    """The schedulers of a fabric, and the credentials to call them with."""

    schedulers: Sequence[str]
    credentials: FabricCredentials | None


async def drain(
    schedulers: Sequence[str],
    worker_id: str,
    *,
    is_stop: bool,
    is_waiting: bool,
    show: Callable[[str], object],
    credentials: FabricCredentials | None = None,
) -> None:
    """Ask a worker to accept no more sessions, say what comes next, and wait if asked to.

    Raises CommandError.
    """
    request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, is_stop=is_stop)
    fabric = _Fabric(schedulers, credentials)
    await _administer(fabric, lambda stub: stub.DrainWorker(request, timeout=TIMEOUT_S))
    show(f"worker {worker_id} accepts no more sessions\n")
    show(
        "its duplex sessions move to other workers with the same model as soon as these have free"
        " slots; its chats end with their answer\n"
    )
    if is_stop:
        show("its process ends when it has no session, at the latest after its --drain-timeout-s\n")
    elif not is_waiting:
        show(
            f"next: `duplane drain {worker_id}` with --wait waits until it has no session, with"
            " --stop also ends its process, with --undo takes the drain back\n"
        )
    if is_waiting:
        await _until_drained(fabric, worker_id, is_stop, show)


async def undrain(
    schedulers: Sequence[str],
    worker_id: str,
    *,
    show: Callable[[str], object],
    credentials: FabricCredentials | None = None,
) -> None:
    """Take a drain back. Raises CommandError, also if the worker still drains."""
    request = admin_pb2.UndrainWorkerRequest(worker_id=worker_id)
    fabric = _Fabric(schedulers, credentials)
    await _administer(fabric, lambda stub: stub.UndrainWorker(request, timeout=TIMEOUT_S))
    deadline = time.monotonic() + _UNDRAIN_TIMEOUT_S
    while (await _worker(fabric, worker_id))[0].is_draining:
        if time.monotonic() > deadline:
            raise CommandError(
                f"worker {worker_id} still drains: its process ends, its device is stuck, or it is"
                " of a release that takes no drain back"
            )
        await asyncio.sleep(_INTERVAL_S)
    show(f"worker {worker_id} accepts sessions again\n")


async def _administer(
    fabric: _Fabric,
    call: Callable[[admin_pb2_grpc.AdminServiceAsyncStub], Awaitable[_Answer]],
) -> _Answer:
    async with FabricClient(fabric.schedulers, fabric.credentials) as client:
        try:
            return await client.administer(call)
        except FabricError as error:
            raise CommandError(_message(error)) from None


def _message(error: FabricError) -> str:
    hint = "; `duplane status` lists the workers" if error.reason is Reason.UNKNOWN_WORKER else ""
    return f"{error.message}{hint}"


async def _until_drained(
    fabric: _Fabric, worker_id: str, is_stop: bool, show: Callable[[str], object]
) -> None:
    """Wait until a draining worker has no session or, with `is_stop`, until its process ends."""
    shown = None
    while True:
        try:
            status, session_count = await _worker(fabric, worker_id)
        except _EndedError:
            show(f"worker {worker_id} has ended\n")
            return
        if not status.is_draining:
            raise CommandError(f"worker {worker_id} no longer drains: the drain was taken back")
        # Until the worker has reported that it drains, it may accept a lease that was granted.
        is_drained = status.worker.is_draining and not session_count
        if is_drained and not is_stop:
            show(f"worker {worker_id} has no session\n")
            return
        fixed_count = sum(slot.cannot_move for slot in status.worker.slots)
        if session_count and (session_count, fixed_count) != shown:
            shown = session_count, fixed_count
            note = f", of which {fixed_count} cannot move" if fixed_count else ""
            show(f"sessions of worker {worker_id}: {session_count}{note}\n")
        await asyncio.sleep(_INTERVAL_S)


class _DetachedError(CommandError):
    """The worker is not attached."""


class _EndedError(_DetachedError):
    """The worker is not listed."""


async def _worker(fabric: _Fabric, worker_id: str) -> tuple[admin_pb2.WorkerStatus, int]:
    """Return an attached worker as `_look` does, also if a scheduler restarts meanwhile.

    Raises CommandError.
    """
    failure: type[CommandError] | None = None  # of the last look
    since = 0.0
    while True:
        try:
            return await _look(fabric, worker_id)
        except CommandError as error:
            now = time.monotonic()
            if failure is not type(error):
                failure, since = type(error), now
            is_detached = isinstance(error, _DetachedError)
            if now - since >= (_DETACHED_S if is_detached else _SILENT_S):
                raise
        await asyncio.sleep(_INTERVAL_S)


async def _look(fabric: _Fabric, worker_id: str) -> tuple[admin_pb2.WorkerStatus, int]:
    """Return a worker, and the number of its slots that are granted, held or being cleaned."""
    state = merge(await read_fabric(fabric.schedulers, fabric.credentials))
    status = next((one for one in state.workers if one.worker.worker_id == worker_id), None)
    if status is None:
        raise _EndedError(f"worker {worker_id} has ended")
    if status.HasField("lost_duration"):
        raise _DetachedError(f"worker {worker_id} was lost: {status.lost_reason}")
    held = {slot.slot for slot in status.worker.slots if slot.state in _HELD}
    leased = (one.claims for one in state.leases if one.claims.worker_id == worker_id)
    return status, len(held | {claims.slot for claims in leased})
