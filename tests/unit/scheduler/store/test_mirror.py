"""The copy of etcd's content, if etcd becomes another cluster or loses revisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import cast

import pytest
from support.time_limits import WITHIN_S

from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.etcd.watch import OtherHistoryError
from duplane.scheduler.store.etcd import mirror as mirror_module
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.keys import Keys
from duplane.scheduler.store.etcd.mirror import Mirror

KEYS = Keys("/test/")


class Etcd:
    """An etcd with one key, which revision 5 has written."""

    def __init__(self) -> None:
        self.cluster_id, self.revision, self.base = 1, 9, 1000

    async def read_all(
        self, prefix: bytes
    ) -> tuple[etcd_pb2.ResponseHeader, list[etcd_pb2.KeyValue]]:
        del prefix
        header = etcd_pb2.ResponseHeader(cluster_id=self.cluster_id, revision=self.revision)
        return header, [etcd_pb2.KeyValue(key=KEYS.base, value=b"%d" % self.base, mod_revision=5)]


@pytest.mark.parametrize(("cluster_id", "revision"), [(2, 9), (1, 8)], ids=["exchanged", "back"])
async def test_value_of_another_history_replaces_one_of_the_same_revision(
    cluster_id: int, revision: int
) -> None:
    etcd = Etcd()
    facts = Facts(KEYS)
    mirror = Mirror(cast(EtcdClient, etcd), facts)
    await mirror._read_all()
    etcd.base = 2000
    await mirror._read_all()
    assert facts.base == 1000, "a known revision of the same history is not read again"
    etcd.cluster_id = cluster_id
    etcd.revision = revision
    await mirror._read_all()
    assert facts.base == 2000


class Watch:
    """Raises OtherHistoryError once. Then etcd reaches the former revision before it is read."""

    etcd: Etcd
    has_failed: asyncio.Event

    def __init__(self, *_: object) -> None:
        pass

    async def batches(self) -> AsyncGenerator[Sequence[etcd_pb2.Event]]:
        if not self.has_failed.is_set():
            self.has_failed.set()
            self.etcd.base = 2000
            raise OtherHistoryError("etcd went back")
        await asyncio.Event().wait()
        yield []

    async def close(self) -> None:
        pass


async def test_history_that_the_watch_found_is_not_judged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    etcd = Etcd()
    facts = Facts(KEYS)
    Watch.etcd = etcd
    Watch.has_failed = asyncio.Event()
    monkeypatch.setattr(mirror_module, "PrefixWatch", Watch)
    mirror = Mirror(cast(EtcdClient, etcd), facts)
    running = asyncio.create_task(mirror.run())
    async with asyncio.timeout(WITHIN_S):
        await Watch.has_failed.wait()
        await mirror.until(lambda: facts.base == 2000)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
