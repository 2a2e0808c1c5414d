"""Operations are sent to etcd while events arrive between two passes of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import cast

import grpc
import pytest
from support.time_limits import WITHIN_S

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.etcd.client import EtcdClient, EtcdError
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.base import Worker
from duplane.scheduler.store.etcd import operations
from duplane.scheduler.store.etcd.commits import Commits
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.keys import Keys
from duplane.scheduler.store.etcd.mirror import Mirror
from duplane.scheduler.store.etcd.records import reports_value, worker_value
from duplane.scheduler.store.etcd.session import Session
from duplane.scheduler.store.etcd.transactions import Transaction

KEYS = Keys("/test/")
BASE = 1000


class FakeSession:
    name = "a"
    lease = 10


class Etcd:
    """Collects the requests. A test makes the answers and the events."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[etcd_pb2.TxnRequest] = asyncio.Queue()
        self.refused = b""  # a key that nobody may write
        self._answers: asyncio.Queue[etcd_pb2.TxnResponse] = asyncio.Queue()
        client = cast(EtcdClient, self)
        self.facts = Facts(KEYS)
        self.mirror = Mirror(client, self.facts, clock=lambda: 0.0)  # no portion ends by its time
        self.commits = Commits(client, self.mirror, cast(Session, FakeSession()))
        self.put(KEYS.base, b"%d" % BASE, 1)
        self.put(KEYS.session("a"), b"", 2)

    async def txn(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        self.sent.put_nowait(request)
        if self.refused in keys_of(request):
            raise EtcdError(grpc.StatusCode.PERMISSION_DENIED, "permission denied")
        return await self._answers.get()

    def answer(self, revision: int, *, succeeded: bool = True) -> None:
        response = etcd_pb2.TxnResponse(succeeded=succeeded)
        response.header.revision = revision
        self._answers.put_nowait(response)

    def put(self, key: bytes, value: bytes, revision: int) -> None:
        held = etcd_pb2.KeyValue(key=key, value=value, mod_revision=revision)
        applying = self.mirror._apply_batch([etcd_pb2.Event(kv=held)])
        with pytest.raises(StopIteration):  # the mirror applies this few events without a pause
            applying.send(None)


def put_base(facts: Facts) -> Transaction[bool]:
    step = Transaction[bool](facts, lambda _: True)
    step.put(KEYS.worker("w"), b"%d" % facts.base)
    return step


async def test_values_are_written_only_with_the_base_that_they_contain() -> None:
    etcd = Etcd()
    committing = asyncio.create_task(etcd.commits.commit(put_base))
    # `commit` has scheduled `_flush`, which runs in the next pass of the loop.
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(etcd.put, KEYS.base, b"5000", 3)  # after `_flush`
    request = await asyncio.wait_for(etcd.sent.get(), WITHIN_S)
    assert request.success[0].request_put.value == b"%d" % BASE
    assert {one.key: one.mod_revision for one in request.compare}[KEYS.base] == 1
    committing.cancel()
    etcd.commits.close()


def test_report_that_raises_the_base_shares_no_transaction() -> None:
    facts = Etcd().facts
    register = registry_pb2.Register(worker_id="w", slots=[registry_pb2.SlotReport()])
    worker = Worker.of(0, register)
    values = {
        KEYS.worker("w"): worker_value(worker, BASE),
        KEYS.reports("w"): reports_value(worker.slots),
    }
    held = [
        etcd_pb2.KeyValue(key=key, value=value, mod_revision=3) for key, value in values.items()
    ]
    list(facts.apply([etcd_pb2.Event(kv=one) for one in held], 3))
    known = facts.workers["w"]
    for number, is_alone in ((1, False), (facts.number + 100, True)):
        slots = (registry_pb2.SlotReport(fencing_number=number),)
        step = operations.report(facts, replace(known, slots=slots))
        assert isinstance(step, Transaction)
        assert step.is_alone is is_alone


async def test_operation_ends_with_the_store_though_its_sending_has_not_begun() -> None:
    etcd = Etcd()
    committing = asyncio.create_task(etcd.commits.commit(put_base))
    # `commit` has scheduled `_flush`, which runs in the next pass of the loop.
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(etcd.commits.close)  # after `_flush`
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(committing, WITHIN_S)
    assert not etcd.commits.count
    assert etcd.sent.empty()


async def test_base_rises_before_the_next_operation_after_etcd_went_back() -> None:
    etcd = Etcd()
    etcd.put(KEYS.barrier, b"", 1_000_000)
    highest = etcd.facts.number
    base = etcd_pb2.KeyValue(key=KEYS.base, value=b"%d" % BASE, mod_revision=1)
    session = etcd_pb2.KeyValue(key=KEYS.session("a"), mod_revision=2)
    list(etcd.facts.replace([base, session], 500))
    committing = asyncio.create_task(etcd.commits.commit(put_base))
    request = await asyncio.wait_for(etcd.sent.get(), WITHIN_S)
    (change,) = request.success
    assert change.request_put.key == KEYS.base
    etcd.put(KEYS.base, change.request_put.value, 501)
    assert etcd.facts.number == highest + 1
    etcd.answer(501)
    request = await asyncio.wait_for(etcd.sent.get(), WITHIN_S)
    assert request.success[0].request_put.value == b"%d" % etcd.facts.base
    committing.cancel()
    etcd.commits.close()


def alone(facts: Facts, name: str) -> Transaction[bool]:
    step = Transaction[bool](facts, lambda _: True, is_alone=True)
    step.put(KEYS.worker(name), b"")
    return step


def put(facts: Facts, name: str) -> Transaction[bool]:
    step = Transaction[bool](facts, lambda _: True)
    step.put(KEYS.worker(name), b"")
    return step


def keys_of(request: etcd_pb2.TxnRequest) -> list[bytes]:
    """Return the keys that a request and its nested transactions put."""
    keys: list[bytes] = []
    for change in request.success:
        if change.HasField("request_txn"):
            keys += keys_of(change.request_txn)
        else:
            keys.append(change.request_put.key)
    return keys


async def test_registrations_pass_over_other_operations_only_a_few_times() -> None:
    etcd = Etcd()
    for number in range(100):
        etcd.commits.begin(partial(alone, name=f"w{number}"), is_arrival=True)
    for number in range(3):
        etcd.commits.begin(partial(put, name=f"other{number}"))
    sent: list[list[bytes]] = []
    async with asyncio.timeout(WITHIN_S):  # no answer comes, so not all are sent
        while len(sent) < 16:
            sent.append(keys_of(await etcd.sent.get()))
    others = [KEYS.worker(f"other{number}") for number in range(3)]
    assert sent.index(others) == 4
    rest = [KEYS.worker(f"w{number}") for number in range(15)]
    assert [keys for keys in sent if keys != others] == [[key] for key in rest]
    etcd.commits.close()


async def test_each_waiting_operation_is_examined_a_bounded_number_of_times() -> None:
    etcd = Etcd()
    count = 300
    examined = Counter[str]()

    def step_of(facts: Facts, name: str) -> Transaction[bool]:
        examined[name] += 1
        return alone(facts, name)

    ended = [etcd.commits.begin(partial(step_of, name=f"w{number}")) for number in range(count)]
    seen: list[bytes] = []
    async with asyncio.timeout(WITHIN_S):
        for revision in range(3, count + 3):
            seen += keys_of(await etcd.sent.get())
            etcd.put(KEYS.barrier, b"", revision)
            etcd.answer(revision)
        await asyncio.gather(*ended)
    assert seen == [KEYS.worker(f"w{number}") for number in range(count)]
    assert max(examined.values()) == 1
    etcd.commits.close()


async def test_operation_whose_conditions_fail_returns_to_its_place() -> None:
    etcd = Etcd()
    for name in ("first", "second", "third"):
        etcd.commits.begin(partial(alone, name=name))
    async with asyncio.timeout(WITHIN_S):
        assert keys_of(await etcd.sent.get()) == [KEYS.worker("first")]
        etcd.put(KEYS.barrier, b"", 3)
        etcd.answer(3, succeeded=False)
        assert keys_of(await etcd.sent.get()) == [KEYS.worker("first")]
    etcd.commits.close()


async def test_operation_that_etcd_refuses_stops_no_other_one() -> None:
    etcd = Etcd()
    names = ("first", "refused", "third")
    etcd.refused = KEYS.worker("refused")
    ended = [etcd.commits.begin(partial(put, name=name)) for name in names]
    async with asyncio.timeout(WITHIN_S):
        for revision in (3, 4):
            while etcd.refused in (keys := keys_of(await etcd.sent.get())):
                pass
            assert keys == [KEYS.worker("first" if revision == 3 else "third")]
            etcd.put(KEYS.barrier, b"", revision)
            etcd.answer(revision)
        await asyncio.gather(ended[0], ended[2])
    assert not ended[1].done()
    etcd.commits.close()
