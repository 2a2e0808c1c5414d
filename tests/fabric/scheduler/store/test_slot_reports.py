"""How the reports of slots are stored in etcd, also beside schedulers of an older release.

A scheduler of an older release stores the slots in the registration. It neither writes nor reads
the keys `reports/ID` and `report/ID/N`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from support.scheduler.racing_stores import Pair, settled
from support.scheduler.scheduler_harness import (
    CLEANING,
    FREE,
    OCCUPIED,
    register_message,
    slot_reports,
)

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.etcd.client import EtcdClient, end_of
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.base import Worker
from duplane.scheduler.store.etcd import records_pb2
from duplane.scheduler.store.etcd.keys import Keys
from duplane.scheduler.store.etcd.operations import MAX_LATER_REPORTS
from duplane.scheduler.store.etcd.records import worker_value


def states(worker: Worker) -> list[registry_pb2.SlotState]:
    return [slot.state for slot in worker.slots]


def with_states(worker: Worker, *slot_states: registry_pb2.SlotState) -> Worker:
    return replace(worker, slots=tuple(slot_reports(*slot_states)))


async def reported(client: EtcdClient, keys: Keys) -> list[str]:
    """Return the keys of etcd that contain reports, without the store's prefix."""
    _, held = await client.read_all(keys.prefix)
    names = ["/".join(keys.parse(one.key)) for one in held]
    return sorted(name for name in names if name.startswith("report"))


async def stored(client: EtcdClient, keys: Keys) -> records_pb2.WorkerRecord:
    """Return the stored registration of the worker `w`."""
    _, held = await client.read_all(keys.worker("w"))
    return records_pb2.WorkerRecord.FromString(held[0].value)


async def older_register(
    client: EtcdClient, keys: Keys, slots: Sequence[registry_pb2.SlotReport], number: int = 2
) -> None:
    """Register the worker `w` as a scheduler of an older release does."""
    register = register_message("w", slots=slots, stream_number=number)
    worker = Worker(0, register, tuple(register.slots), is_draining=False)
    delete = etcd_pb2.DeleteRangeRequest(key=keys.slots("w"), range_end=end_of(keys.slots("w")))
    changes = [
        etcd_pb2.RequestOp(request_delete_range=delete),
        _put(keys.worker("w"), worker_value(worker, 0)),
        _put(keys.epoch("w"), b""),
    ]
    await client.txn(etcd_pb2.TxnRequest(success=changes))


def _put(key: bytes, value: bytes) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value))


async def test_registration_is_stored_without_its_slots(
    pair: Pair, client: EtcdClient, prefix: str
) -> None:
    one, other = pair
    worker = await one.worker(slot_count=2)
    assert states(worker) == [FREE, FREE]
    assert not (await stored(client, Keys(prefix))).register.slots
    await settled(pair)
    assert other.facts.workers["w"] == worker


async def test_report_writes_only_the_slots_that_have_changed(
    pair: Pair, client: EtcdClient, prefix: str
) -> None:
    one, other = pair
    keys = Keys(prefix)
    worker = await one.worker(slot_count=64)
    changed = with_states(worker, *[FREE] * 63, OCCUPIED)
    one.etcd.sent_count = 0
    assert await one.store.report(changed)
    assert await one.store.report(changed), "a report without a change"
    assert one.etcd.sent_count == 1
    assert await reported(client, keys) == ["report/w/63", "reports/w"]
    await settled(pair)
    assert states(other.facts.workers["w"]) == states(changed)
    assert await one.store.report(replace(changed, is_draining=True))
    assert await reported(client, keys) == ["report/w/63", "reports/w"]
    await settled(pair)
    assert other.facts.workers["w"] == replace(changed, is_draining=True)


async def test_reports_that_etcd_has_lost_are_written_again(
    pair: Pair, client: EtcdClient, prefix: str
) -> None:
    one, other = pair
    keys = Keys(prefix)
    worker = await one.worker(slot_count=2)
    delete = etcd_pb2.DeleteRangeRequest(key=keys.reports("w"))
    change = etcd_pb2.RequestOp(request_delete_range=delete)
    await client.txn(etcd_pb2.TxnRequest(success=[change]))
    await settled(pair)
    assert one.facts.workers["w"].slots == ()
    changed = with_states(worker, FREE, OCCUPIED)
    assert await one.store.report(changed)
    await settled(pair)
    assert other.facts.workers["w"] == changed
    assert await reported(client, keys) == ["reports/w"]


async def test_report_of_many_changes_is_one_value(
    pair: Pair, client: EtcdClient, prefix: str
) -> None:
    one, other = pair
    worker = await one.worker(slot_count=64)
    assert await one.store.report(with_states(worker, CLEANING, *[FREE] * 63))
    many = with_states(worker, *[OCCUPIED] * 64)
    assert await one.store.report(many)
    assert await reported(client, Keys(prefix)) == ["reports/w"]
    await settled(pair)
    assert states(other.facts.workers["w"]) == states(many)


async def test_many_reports_share_a_transaction(pair: Pair) -> None:
    one, other = pair
    names = [f"w{number}" for number in range(24)]
    workers = [await one.store.register(register_message(name, 64)) for name in names]
    one.etcd.sent_count = 0
    occupied = [OCCUPIED] * MAX_LATER_REPORTS + [FREE] * (64 - MAX_LATER_REPORTS)
    reports = [with_states(worker, *occupied) for worker in workers if worker]
    assert all(await asyncio.gather(*(one.store.report(report) for report in reports)))
    assert one.etcd.sent_count == 1
    await settled(pair)
    assert all(states(other.facts.workers[name]) == occupied for name in names)


async def test_end_of_a_registration_leaves_no_report(
    pair: Pair, client: EtcdClient, prefix: str
) -> None:
    one, other = pair
    worker = await one.worker(slot_count=2)
    assert await one.store.report(with_states(worker, FREE, OCCUPIED))
    later = await one.worker(slot_count=2)
    await settled(pair)
    assert states(other.facts.workers["w"]) == [FREE, FREE]
    assert await one.store.report(with_states(later, OCCUPIED, FREE))
    assert await one.store.unregister("w", later.epoch)
    assert await reported(client, Keys(prefix)) == []


async def test_registration_of_an_older_release_keeps_its_slots(
    pair: Pair, client: EtcdClient, prefix: str
) -> None:
    """A scheduler that drains the worker must not remove the slots, which its scheduler needs."""
    one, _ = pair
    keys = Keys(prefix)
    await older_register(client, keys, slot_reports(FREE, OCCUPIED))
    await settled(pair)
    assert states(one.facts.workers["w"]) == [FREE, OCCUPIED]
    assert await one.store.drain("w")
    record = await stored(client, keys)
    assert record.is_drain_requested
    assert [slot.state for slot in record.register.slots] == [FREE, OCCUPIED]
    assert states(one.facts.workers["w"]) == [FREE, OCCUPIED]


async def test_reports_from_before_a_registration_of_an_older_release_do_not_count(
    pair: Pair, client: EtcdClient, prefix: str
) -> None:
    one, other = pair
    keys = Keys(prefix)
    assert await one.store.report(with_states(await one.worker(slot_count=2), OCCUPIED, FREE))
    await older_register(client, keys, slot_reports(FREE, CLEANING))
    await settled(pair)
    assert states(other.facts.workers["w"]) == [FREE, CLEANING]
    again = register_message("w", slots=slot_reports(FREE, FREE), stream_number=3)
    assert await other.store.register(again)
    await settled(pair)
    assert states(one.facts.workers["w"]) == [FREE, FREE]
    assert await reported(client, keys) == ["reports/w"]
