"""The laws of every lease store: conditions that hold after any operation, in random histories.

In a history, schedulers share a store, start and stop, lose their sessions, and lose the answers of
their transactions.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.clock import Clock
from support.scheduler.faulty_client import FaultyClient
from support.scheduler.scheduler_harness import AUDIO, FREE, register_message
from support.scheduler.store_history import CLAIM_TIMEOUT_S, Grants, Replica, slot_key

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.etcd.url import EtcdUrl
from duplane.scheduler.store.base import Grant, LeaseStore, Offer, Worker
from duplane.scheduler.store.etcd.store import EtcdStore
from duplane.scheduler.store.memory import MemoryStore

BOOT_MS = 1_700_000_000_000
BOUND_S = 30.0
SLOTS = 2
WORKERS = ("w0", "w1")
REQUESTS = tuple(f"r{number}" for number in range(6))
FAULTS = ("executed", "executed later", "not executed")
VERBS = (
    "grant",
    "grant",
    "enqueue",
    "grant at once",
    "cancel",
    "claim",
    "give_back",
    "release",
    "register",
)
Answer = TypeVar("Answer")
_prefixes = itertools.count()


class StoreLaws(RuleBasedStateMachine):
    """Makes up to three schedulers run random operations on the event loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str) -> None:
        super().__init__()
        self.loop = loop
        self.url = EtcdUrl.parse(f"{url}p{next(_prefixes)}/") if url.startswith("etcd") else None
        self.clock = Clock()
        self.history = Grants(self.clock)
        self.names = itertools.count()
        self.orders: list[int] = []  # orders of all tickets so far
        self.replicas: list[Replica] = []
        for _ in range(2 if self.url else 1):
            self.open()

    def do(self, operation: Coroutine[Any, Any, Answer]) -> Answer:
        async def bounded() -> Answer:
            try:
                async with asyncio.timeout(BOUND_S):
                    return await operation
            finally:
                for replica in self.replicas:
                    replica.check()

        running = asyncio.run_coroutine_threadsafe(bounded(), self.loop)
        return running.result(2 * BOUND_S)  # the loop may have stopped

    def replica(self, which: int) -> Replica:
        return self.replicas[which % len(self.replicas)]

    def open(self) -> None:
        async def start() -> None:
            etcd = FaultyClient(self.url) if self.url else None
            store: LeaseStore = (
                EtcdStore(etcd, self.url.prefix, BOOT_MS, self.clock)
                if etcd and self.url
                else MemoryStore(BOOT_MS, self.clock)
            )
            self.replicas.append(Replica(store, self.history, etcd))
            await self.replicas[-1].settle()

        self.do(start())

    def teardown(self) -> None:
        for replica in self.replicas:
            self.do(replica.close())

    @precondition(lambda self: self.url)
    @rule(which=st.integers(0, 2))
    def crash(self, which: int) -> None:
        """End a scheduler without cleanup, and start another scheduler."""
        replica = self.replica(which)
        self.replicas.remove(replica)
        self.do(replica.close())
        self.open()

    @precondition(lambda self: self.url)
    @rule(which=st.integers(0, 2))
    def lose_session(self, which: int) -> None:
        self.do(self.replica(which).lose_session())

    @precondition(lambda self: self.url)
    @rule(which=st.integers(0, 2), fault=st.sampled_from(FAULTS))
    def lose_next_answer(self, which: int, fault: str) -> None:
        etcd = self.replica(which).etcd
        assert etcd
        etcd.next_fault = fault

    @precondition(lambda self: self.url)
    @rule(which=st.integers(0, 2))
    def late_transactions_arrive(self, which: int) -> None:
        etcd = self.replica(which).etcd
        assert etcd
        self.do(etcd.execute_late())

    @rule(
        verbs=st.lists(
            st.tuples(st.integers(0, 2), st.sampled_from(VERBS), st.integers(0, 1)),
            min_size=2,
            max_size=5,
        )
    )
    def race(self, verbs: list[tuple[int, str, int]]) -> None:
        """Run several operations together. The subscribers' views check the resulting changes."""

        async def all_at_once() -> None:
            operations = [
                self.operation(self.replica(which), verb, pick) for which, verb, pick in verbs
            ]
            await asyncio.gather(*filter(None, operations))

        self.do(all_at_once())

    def operation(
        self, replica: Replica, verb: str, pick: int
    ) -> Coroutine[Any, Any, object] | None:
        view, store, name = replica.view, replica.store, WORKERS[pick]
        ticket, grant = picked(view.tickets, pick), picked(view.grants, pick)
        worker = view.workers.get(WORKERS[0])  # all grants of a race are for this worker
        if verb in ("enqueue", "grant at once"):
            request = lease_pb2.AcquireLeaseRequest(request_id=REQUESTS[pick], kind=AUDIO)
            offer = self.offer(worker) if worker and verb == "grant at once" else None
            order = self.orders[-1] if self.orders and offer is None else None
            return store.enqueue(request, f"owner{next(self.names)}", order, offer)
        if verb == "register":
            return store.register(register_message(name, SLOTS))
        if verb == "cancel" and ticket:
            return store.cancel(ticket.order, ticket.owner)
        if verb == "grant" and ticket and worker:
            return store.try_grant(ticket, self.offer(worker))
        if verb in ("claim", "give_back", "release") and grant:
            return getattr(store, verb)(grant)
        return None

    @rule(which=st.integers(0, 2), name=st.sampled_from(WORKERS), seen=st.integers(0, 1))
    def register(self, which: int, name: str, seen: int) -> None:
        replica = self.replica(which)
        known = replica.view.workers.get(name)
        number = (known.epoch + 5) * seen if known else 0
        slots = [
            registry_pb2.SlotReport(slot=slot, state=FREE, fencing_number=number)
            for slot in range(SLOTS)
        ]
        worker = self.do(replica.store.register(register_message(name, slots=slots)))
        assert worker
        assert worker.epoch > number
        assert known is None or worker.epoch > known.epoch
        assert replica.view.workers[name] == worker, "returned before its change was published"

    @rule(which=st.integers(0, 2), name=st.sampled_from(WORKERS))
    def another_incarnation(self, which: int, name: str) -> None:
        replica = self.replica(which)
        if name in replica.view.workers:
            message = register_message(name, incarnation="another")
            assert self.do(replica.store.register(message)) is None

    @rule(which=st.integers(0, 2), name=st.sampled_from(WORKERS))
    def unregister(self, which: int, name: str) -> None:
        replica = self.replica(which)
        if worker := replica.view.workers.get(name):
            self.do(replica.store.unregister(name, worker.epoch))
            assert name not in replica.view.workers

    @rule(which=st.integers(0, 2), name=st.sampled_from(WORKERS))
    def drain(self, which: int, name: str) -> None:
        replica = self.replica(which)
        is_known = name in replica.view.workers
        assert self.do(replica.store.drain(name)) == is_known
        assert not is_known or replica.view.workers[name].is_drain_requested

    @rule(which=st.integers(0, 2), name=st.sampled_from(REQUESTS), old=st.integers(-3, -1))
    def enqueue(self, which: int, name: str, old: int) -> None:
        replica = self.replica(which)
        order = self.orders[old] if old > -3 and len(self.orders) >= 3 else None
        before = set(replica.view.tickets)
        request = lease_pb2.AcquireLeaseRequest(request_id=name, kind=AUDIO)
        owner = f"owner{next(self.names)}"
        found = self.do(replica.store.enqueue(request, owner, order))
        if isinstance(found, Grant):
            assert replica.view.grants[slot_key(found)] == found
            return
        assert replica.view.tickets[found.order] == found
        assert found.owner == owner
        if found.order not in before and order is None:
            assert found.order > max(before, default=0), "a new ticket is not the last"
            self.orders.append(found.order)
        assert order is None or found.order in before or found.order == order

    @rule(which=st.integers(0, 2), pick=st.integers(0, 3))
    def cancel(self, which: int, pick: int) -> None:
        replica = self.replica(which)
        if ticket := picked(replica.view.tickets, pick):
            self.do(replica.store.cancel(ticket.order, ticket.owner))
            assert ticket.order not in replica.view.tickets

    @rule(
        which=st.integers(0, 2),
        pick=st.integers(0, 3),
        name=st.sampled_from(WORKERS),
        slot=st.integers(0, SLOTS - 1),
    )
    def grant(self, which: int, pick: int, name: str, slot: int) -> None:
        replica = self.replica(which)
        ticket, worker = picked(replica.view.tickets, pick), replica.view.workers.get(name)
        if ticket is None or worker is None:
            return
        is_free = (name, slot) not in replica.view.grants
        offer = self.offer(worker, slot)
        grant = self.do(replica.store.try_grant(ticket, offer))
        if grant:
            assert is_free
            assert replica.view.grants[name, slot] == grant
            assert grant.claims.fencing_number > worker.epoch
            assert ticket.order not in replica.view.tickets
        for other in self.replicas:
            again = self.do(other.store.try_grant(ticket, self.offer(worker, slot)))
            assert again is None or grant is None, "a ticket was granted twice"
            grant = grant or again

    def offer(self, worker: Worker, slot: int = 0) -> Offer:
        claims = lease_pb2.LeaseClaims(
            lease_id=f"lease{next(self.names)}",
            worker_id=worker.worker_id,
            worker_epoch=worker.epoch,
            slot=slot,
            kind=AUDIO,
        )
        return Offer(claims, CLAIM_TIMEOUT_S)

    @rule(
        which=st.integers(0, 2),
        request=st.sampled_from(REQUESTS),
        name=st.sampled_from(WORKERS),
        slot=st.integers(0, SLOTS - 1),
    )
    def grant_at_once(self, which: int, request: str, name: str, slot: int) -> None:
        replica = self.replica(which)
        view, worker = replica.view, replica.view.workers.get(name)
        if worker is None:
            return
        is_free = (name, slot) not in view.grants
        is_known = any(one.request.request_id == request for one in view.tickets.values())
        is_held = any(
            one.ticket and one.ticket.request.request_id == request for one in view.grants.values()
        )
        may_grant = is_free and not view.tickets
        message = lease_pb2.AcquireLeaseRequest(request_id=request, kind=AUDIO)
        owner = f"owner{next(self.names)}"
        found = self.do(replica.store.enqueue(message, owner, None, self.offer(worker, slot)))
        if not is_known and not is_held:
            assert isinstance(found, Grant) == may_grant
        if isinstance(found, Grant):
            assert view.grants[slot_key(found)] == found
        else:
            assert view.tickets[found.order].owner == owner

    @rule(
        which=st.integers(0, 2),
        pick=st.integers(0, 3),
        verb=st.sampled_from(["claim", "claim", "give_back", "release"]),
    )
    def use(self, which: int, pick: int, verb: str) -> None:
        replica = self.replica(which)
        if grant := picked(replica.view.grants, pick):
            self.do(getattr(replica.store, verb)(grant))
            left = replica.view.grants.get(slot_key(grant))
            if left:
                assert verb == "claim" or (verb == "give_back" and left.is_revoked)
                assert left.is_claimed

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.clock.now_s += seconds
        for replica in self.replicas:
            self.do(replica.expire())

    @invariant()
    def all_know_the_same(self) -> None:
        for replica in self.replicas:
            self.do(replica.settle())
        first = self.replicas[0].view
        for other in self.replicas[1:]:
            assert other.view.workers == first.workers
            assert other.view.tickets == first.tickets
            assert other.view.grants == first.grants
        requests = [ticket.request.request_id for ticket in first.tickets.values()]
        requests += [one.ticket.request.request_id for one in first.grants.values() if one.ticket]
        assert len(requests) == len(set(requests)), "a request is there twice"


def picked(facts: dict[Any, Answer], pick: int) -> Answer | None:
    values = [facts[key] for key in sorted(facts)]
    return values[pick] if pick < len(values) else None


@pytest.mark.slow
async def test_laws_hold_in_every_history(store_url: str) -> None:
    is_memory = store_url == "memory:"
    bounds = settings(
        max_examples=100 if is_memory else 20,
        stateful_step_count=40 if is_memory else 30,
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    factory: Any = functools.partial(StoreLaws, asyncio.get_running_loop(), store_url)
    # In a thread, because a state machine waits for each operation on the event loop.
    await asyncio.to_thread(run_state_machine_as_test, factory, settings=bounds)
