"""Grants in etcd that expire at the same time end in few transactions, each of bounded size."""

from __future__ import annotations

import asyncio
from typing import Any

from simulation.calls import schedulers_of, simulated
from simulation.etcd import SimulatedClient
from support.scheduler.scheduler_harness import AUDIO, register_message

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.base import LeaseStore, Offer, Worker

COUNT = 200
CLAIM_TIMEOUT_S = 5.0


async def grant(store: LeaseStore, worker: Worker, slot: int) -> None:
    request = lease_pb2.AcquireLeaseRequest(request_id=f"r{slot}", kind=AUDIO)
    claims = lease_pb2.LeaseClaims(
        lease_id=f"lease {slot}", worker_id="w", worker_epoch=worker.epoch, slot=slot, kind=AUDIO
    )
    await store.enqueue(request, "owner", None, Offer(claims, CLAIM_TIMEOUT_S))


def test_grants_that_expire_together_share_transactions() -> None:
    async def main() -> None:
        async with schedulers_of(1) as fabric:
            (scheduler,) = fabric.schedulers
            sent = list[int]()
            most = list[int]()
            worker = await scheduler.store.register(register_message(slot_count=COUNT))
            assert worker
            await asyncio.gather(*(grant(scheduler.store, worker, slot) for slot in range(COUNT)))
            assert len(scheduler.state.grants) == COUNT
            txn = SimulatedClient.txn
            commits = vars(scheduler.store)["_commits"]

            async def counted(request: etcd_pb2.TxnRequest) -> Any:
                sent.append(len(request.success))
                most.append(commits.count)
                return await txn(fabric.clients[0], request)

            fabric.clients[0].txn = counted  # type: ignore[method-assign] - counts the calls
            await asyncio.sleep(CLAIM_TIMEOUT_S + 1)
            assert not scheduler.state.grants
            assert sum(sent) >= COUNT
            assert len(sent) < COUNT / 16
            assert max(most) <= 64

    simulated(main())
