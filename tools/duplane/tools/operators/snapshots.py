"""Reads the state of a fabric from its schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from duplane.fabric.channel import open_channel
from duplane.fabric.errors import from_rpc
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.tls.failures import tls_failure
from duplane.fabric.tls.identity import Role
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc
from duplane.tools.command import CommandError

TIMEOUT_S = 5.0  # for one call to a scheduler


@dataclass(frozen=True)
class SchedulerView:
    """One scheduler: its state, or why it did not answer."""

    address: str
    snapshot: admin_pb2.Snapshot
    failure: str = ""


async def read_fabric(
    schedulers: Sequence[str], credentials: FabricCredentials | None = None
) -> Sequence[SchedulerView]:
    """Read the state at each scheduler. Raises CommandError if none answers."""
    views = await asyncio.gather(*(_read(address, credentials) for address in schedulers))
    if all(view.failure for view in views):
        reasons = "; ".join(f"{view.address}: {view.failure}" for view in views)
        raise CommandError(f"no scheduler answers: {reasons}")
    return views


async def _read(address: str, credentials: FabricCredentials | None) -> SchedulerView:
    """Read the first messages of a watch: together they are the whole state."""
    whole = admin_pb2.Snapshot()
    async with open_channel(address, Role.SCHEDULER, credentials) as channel:
        call = admin_pb2_grpc.AdminServiceStub(channel).Watch(
            admin_pb2.WatchRequest(), timeout=TIMEOUT_S
        )
        try:
            async for response in call:
                whole.MergeFrom(response.snapshot)
                if not response.snapshot.has_more:
                    return SchedulerView(address, whole)
            failure = "the scheduler ended the call"
        except grpc.aio.AioRpcError as error:
            failure = from_rpc(error).message
            if why := tls_failure(failure, is_new=True, has_tls=credentials is not None):
                failure = f"TLS fails: {why}" if credentials else why
        finally:
            call.cancel()
    return SchedulerView(address, admin_pb2.Snapshot(), failure)


def merge(views: Sequence[SchedulerView]) -> admin_pb2.Snapshot:
    """Combine the states of the schedulers. Schedulers that share a store report the same state.

    Only the scheduler to which a worker is attached knows the whole report of the worker.
    """
    seen = [one for view in views for one in view.snapshot.workers]
    seen.sort(key=lambda one: (one.worker_epoch, one.HasField("report")))
    workers = {one.worker.worker_id: one for one in seen}
    leases = {one.claims.lease_id: one for view in views for one in view.snapshot.leases}
    tickets = {one.ticket_id: one for view in views for one in view.snapshot.tickets}
    return admin_pb2.Snapshot(
        workers=[workers[name] for name in sorted(workers)],
        leases=leases.values(),
        tickets=[tickets[name] for name in sorted(tickets)],
        ticket_limit=max(view.snapshot.ticket_limit for view in views),
        store_refusal=next(filter(None, (view.snapshot.store_refusal for view in views)), ""),
    )
