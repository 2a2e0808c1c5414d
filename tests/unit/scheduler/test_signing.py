"""Replacement of signing keys while the schedulers run, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from simulation.calls import Schedulers, granted, schedulers_of, simulated
from simulation.network import Call, CallError
from support.scheduler.scheduler_harness import FREE, slot_reports

from duplane.fabric.errors import FabricError
from duplane.fabric.lease_signing import LEASE_LIFE_S, LeaseSigner, LeaseVerifier
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.signing import KEY_LEAD_S, LeaseKeys
from duplane.scheduler.store.etcd.session import KEY_TTL_S
from duplane.scheduler.store.memory import MemoryStore

AGE_S = 60.0
RUN_S = 400.0
SOON_S = 2.0
CUT_S = 6.0  # during a cut this short, a scheduler counts as in contact with etcd
CLAIMS = lease_pb2.LeaseClaims(lease_id="lease")


class Keys:
    """A worker with one slot.

    It verifies leases. When a lease is revoked, it reports the slot with the fencing number.
    """

    def __init__(self) -> None:
        self.verifier = LeaseVerifier()
        self.has_keys = asyncio.Event()
        self._slots = slot_reports(FREE)

    async def read(self, call: Call) -> None:
        try:
            while True:
                message: registry_pb2.AttachResponse = await call.read()
                if message.HasField("registered"):
                    now = asyncio.get_running_loop().time()
                    self.verifier.trust(message.registered.verification_keys, now)
                    self.has_keys.set()
                if message.HasField("revoke"):
                    self._slots[0].fencing_number = message.revoke.fencing_number
                report = registry_pb2.Report(slots=self._slots)
                call.send(registry_pb2.AttachRequest(report=report))
        except CallError:
            pass

    def verify(self, lease: lease_pb2.Lease) -> None:
        self.verifier.verify(lease, asyncio.get_running_loop().time())


def keys_in_etcd(fabric: Schedulers) -> set[str]:
    return {
        registry_pb2.VerificationKey.FromString(held.value).key_id
        for key, held in fabric.etcd.held.items()
        if b"/signing/" in key
    }


async def leases_of(fabric: Schedulers, worker: Keys) -> Sequence[lease_pb2.Lease]:
    """Acquire a lease at the first scheduler every few seconds.

    The worker must accept each lease immediately.
    """
    loop = asyncio.get_running_loop()
    leases = list[lease_pb2.Lease]()
    while loop.time() < RUN_S:
        request_id = f"r{len(leases)}"
        leases.append((await granted(fabric.acquire(0, request_id))).lease)
        worker.verify(leases[-1])
        fabric.release(0, request_id)
        await asyncio.sleep(2.0)
    return leases


@pytest.mark.parametrize("is_cut", [False, True], ids=["", "late keys"])
def test_each_lease_is_signed_with_a_key_that_workers_know(is_cut: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        worker = Keys()
        async with schedulers_of(2, AGE_S) as fabric:
            # The worker is attached to the scheduler that does not sign.
            attached = fabric.attach(1, 1)
            reading = asyncio.create_task(worker.read(attached))
            await worker.has_keys.wait()
            if is_cut:  # the cut begins when the first scheduler publishes its next key
                loop.call_later(AGE_S - KEY_LEAD_S - 1, fabric.clients[1].cut, CUT_S)
            leases = await leases_of(fabric, worker)
            used = list(dict.fromkeys(lease.key_id for lease in leases))
            assert len(used) == 1 + (RUN_S - AGE_S) // AGE_S + 1
            attached.cut()
            await reading

    simulated(main())


def end_leases(fabric: Schedulers, *kinds: bytes) -> None:
    """End the leases of some keys in etcd, as an etcd leader may do after it was frozen."""
    held = fabric.etcd.held.items()
    for lease in {one.lease for key, one in held if any(kind in key for kind in kinds)}:
        fabric.etcd.revoke(lease)


def test_key_that_ends_early_in_etcd_is_published_again_at_once() -> None:
    async def main() -> None:
        async with schedulers_of(2, AGE_S) as fabric:
            known = keys_in_etcd(fabric)
            end_leases(fabric, b"/signing/")
            assert not keys_in_etcd(fabric)
            await asyncio.sleep(SOON_S)
            assert keys_in_etcd(fabric) == known
            worker = Keys()
            attached = fabric.attach(1, 1)
            reading = asyncio.create_task(worker.read(attached))
            worker.verify((await granted(fabric.acquire(0, "r"))).lease)
            attached.cut()
            await reading

    simulated(main())


def test_next_session_begins_after_its_keys_are_published_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with schedulers_of(1, AGE_S) as fabric:
            (client,) = fabric.clients
            known = keys_in_etcd(fabric)
            order = list[bytes]()
            put = client.put

            async def put_later(key: bytes, value: bytes, lease: int = 0) -> int:
                if b"/signing/" in key:
                    await asyncio.sleep(SOON_S / 2)
                revision = await put(key, value, lease)
                order.append(key)
                return revision

            monkeypatch.setattr(client, "put", put_later)
            end_leases(fabric, b"/signing/", b"/session/", b"/presence/")
            await asyncio.sleep(SOON_S)
            assert keys_in_etcd(fabric) == known
            published = next(at for at, key in enumerate(order) if b"/signing/" in key)
            began = next(at for at, key in enumerate(order) if b"/session/" in key)
            assert published < began

    simulated(main())


def test_lease_stays_valid_for_its_life_after_its_key_was_replaced() -> None:
    async def main() -> None:
        worker = Keys()
        async with schedulers_of(2, AGE_S) as fabric:
            attached = fabric.attach(1, 1)
            reading = asyncio.create_task(worker.read(attached))
            await worker.has_keys.wait()
            keys = fabric.schedulers[0].keys
            first = keys.verification_key.key_id
            await asyncio.sleep(AGE_S - 1)
            last = keys.sign(CLAIMS)
            assert last.key_id == first
            await asyncio.sleep(LEASE_LIFE_S)
            assert keys.verification_key.key_id != first
            worker.verify(last)
            await asyncio.sleep(KEY_TTL_S + LEASE_LIFE_S)
            assert first not in keys_in_etcd(fabric)
            with pytest.raises(FabricError):
                worker.verify(last)
            attached.cut()
            await reading

    simulated(main())


def test_each_scheduler_replaces_its_key_once_though_answers_are_lost() -> None:
    async def main() -> None:
        async with schedulers_of(3, AGE_S) as fabric:
            for client in fabric.clients:
                client.lost_share = 0.3
                client.chance.seed(1)
            seen: set[str] = set()
            while asyncio.get_running_loop().time() < RUN_S:
                present = keys_in_etcd(fabric)
                assert len(present) <= 3 * (2 + (KEY_TTL_S + KEY_LEAD_S) // AGE_S)
                seen |= present
                await asyncio.sleep(1.0)
            assert len(seen) <= 3 * (2 + RUN_S // AGE_S)

    simulated(main())


def test_key_that_vanishes_from_the_store_is_not_used_before_a_new_lead() -> None:
    async def main() -> None:
        store = MemoryStore(1)
        keys = LeaseKeys(store, LeaseSigner(), AGE_S)
        first = keys.verification_key
        running = asyncio.create_task(keys.run())
        published: list[Sequence[registry_pb2.VerificationKey]] = []
        store.watch_keys(published.append)
        await asyncio.sleep(AGE_S - 1)
        assert keys.verification_key == first
        following = published[-1]
        assert len(following) == 2
        store.share_keys([first])  # as if etcd had ended its lease
        await asyncio.sleep(2)
        store.share_keys(following)
        await asyncio.sleep(KEY_LEAD_S - 1)
        assert keys.verification_key == first
        await asyncio.sleep(2)
        assert keys.verification_key != first
        running.cancel()

    simulated(main())


def test_given_key_is_never_replaced() -> None:
    async def main() -> None:
        keys = LeaseKeys(MemoryStore(1), LeaseSigner(), None)
        first = keys.verification_key
        await asyncio.wait_for(keys.run(), 1)
        assert keys.verification_key == first

    simulated(main())
