"""The simulated fabric: its laws hold, a seed repeats its run, and planted faults are found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from simulation.runs import failure_of, simulate
from simulation.virtual_time import DeadlockError, LifelikeLoop, run

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.granting import GrantLoop
from duplane.scheduler.policy.fair_queue import FairQueue, QueueEntry
from duplane.scheduler.policy.placement import Candidate
from duplane.scheduler.policy.slot_reports import Verdict, judge
from duplane.scheduler.policy.turns import Turn, Turns
from duplane.scheduler.rpc import leases, registry
from duplane.scheduler.store.base import Grant, Offer, Ticket
from duplane.scheduler.store.etcd import operations
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.store import EtcdStore
from duplane.scheduler.store.memory import MemoryStore
from duplane.scheduler.store.unclaimed_grants import ClaimDeadlines
from duplane.scheduler.waiters import Waiters
from duplane.worker.admission import Admission

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_laws_hold_whatever_fails() -> None:
    assert [failure for seed in range(1, 21) if (failure := failure_of(seed))] == []


def test_seed_reproduces_its_run() -> None:
    first, second = simulate(5), simulate(5)
    assert len(first) > 20
    assert first == second
    assert first != simulate(6)


def two_grants(patch: pytest.MonkeyPatch) -> None:
    candidate = Candidate.of
    granted = MemoryStore.try_grant

    async def forgetful(store: Any, ticket: Ticket, offer: Offer) -> Any:
        store._grants.get(offer.claims.worker_id, {}).pop(offer.claims.slot, None)
        return await granted(store, ticket, offer)

    patch.setattr(Candidate, "of", lambda worker, _, *others: candidate(worker, {}, *others))
    patch.setattr(MemoryStore, "try_grant", forgetful)


def no_expiry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClaimDeadlines, "add", lambda *_: None)


def no_release(patch: pytest.MonkeyPatch) -> None:
    def judged(grant: Grant | None, report: registry_pb2.SlotReport) -> Verdict:
        verdict = judge(grant, report)
        return Verdict.NOTHING if verdict is Verdict.ENDED else verdict

    patch.setattr(registry, "judge", judged)


def last_first(patch: pytest.MonkeyPatch) -> None:
    in_order = FairQueue.of_kinds
    patch.setattr(FairQueue, "of_kinds", lambda *args: reversed(list(in_order(*args))))


def no_turns(patch: pytest.MonkeyPatch) -> None:
    def turn_of(turns: Any, tenant_id: str) -> Turn:
        first = turns._lines[tenant_id][0]
        return first, first, tenant_id

    patch.setattr(Turns, "turn_of", turn_of)


def growing_positions(patch: pytest.MonkeyPatch) -> None:
    def ranked(queue: Any, order: int, rank: int) -> QueueEntry:
        entry = queue._entries[order]
        entry.position = rank
        return entry

    patch.setattr(FairQueue, "_ranked", ranked)
    patch.setattr(leases, "min", lambda _, position: position, raising=False)


def lost_wakeups(patch: pytest.MonkeyPatch) -> None:
    wake = GrantLoop.wake  # pyright: ignore[reportPrivateUsage]  # the planted fault
    changes = iter(range(1_000_000))

    def wake_at_first(loop: GrantLoop) -> None:
        if next(changes) < 5:
            wake(loop)

    patch.setattr(GrantLoop, "wake", wake_at_first)


def back_to_the_end(patch: pytest.MonkeyPatch) -> None:
    enqueue = operations.enqueue

    def enqueue_last(facts: Any, request: Any, owner: str, order: object, *others: Any) -> Any:
        return enqueue(facts, request, owner, None, *others)

    patch.setattr(operations, "enqueue", enqueue_last)


def forgotten_calls(patch: pytest.MonkeyPatch) -> None:
    async def leave(waiters: Waiters, waiter: object) -> None:
        """Leave the queue and keep the waiter."""

    patch.setattr(Waiters, "_leave", leave)


class Forgetful(dict[Any, Any]):
    def get(self, *_: object) -> None:
        """Find nothing."""


def repeated_requests(patch: pytest.MonkeyPatch) -> None:
    begin = MemoryStore.__init__
    begin_facts = Facts.__init__

    def forget(store: Any, *others: Any) -> None:
        begin(store, *others)
        store._granted = Forgetful()

    def forget_facts(facts: Any, *others: Any) -> None:
        begin_facts(facts, *others)
        facts.granted = Forgetful()

    patch.setattr(MemoryStore, "__init__", forget)
    patch.setattr(Facts, "__init__", forget_facts)


def no_fencing(patch: pytest.MonkeyPatch) -> None:
    claim = Admission.claim

    def forget(admission: Any, *others: Any) -> lease_pb2.LeaseClaims:
        admission._slots = [replace(slot, fencing_number=0) for slot in admission.slots]
        return claim(admission, *others)

    patch.setattr(Admission, "claim", forget)


def no_adoption(patch: pytest.MonkeyPatch) -> None:
    async def adopt(*_: object) -> bool:
        return False

    patch.setattr(MemoryStore, "adopt", adopt)
    patch.setattr(EtcdStore, "adopt", adopt)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "law"),
    [
        (two_grants, "two live grants on one slot"),
        (no_expiry, "grants are left"),
        (no_release, "grants are left"),
        (last_first, "a ticket was overtaken"),
        (no_turns, "a tenant did not get its turn"),
        (growing_positions, "a position has grown"),
        (lost_wakeups, "a ticket was lost"),
        (forgotten_calls, "waiting calls are left"),
        (back_to_the_end, "a caller has lost its place"),
        (repeated_requests, "one request is served twice"),
        (no_fencing, "a session began with an earlier lease"),
        (no_adoption, "an occupied slot has no grant"),
    ],
)
def test_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, plant: Plant, law: str) -> None:
    plant(monkeypatch)
    failures = (failure_of(seed) for seed in range(1, 61))
    assert any(law in failure for failure in failures)


def test_simulation_has_the_inaccuracies_of_a_real_loop() -> None:
    async def lateness_s() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(1)
        return loop.time() - (began + 1)

    async def main() -> list[float]:
        assert asyncio.get_running_loop().time() > 2**15
        return [await lateness_s() for _ in range(100)]

    late_s = run(main(), LifelikeLoop)
    assert -0.0005 < min(late_s) < -0.0003
    assert 0.001 < max(late_s) < 0.003


def test_time_passes_only_in_the_simulation() -> None:
    async def sleep() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(sleep()) == 3600

    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run(wait_for_nobody())
