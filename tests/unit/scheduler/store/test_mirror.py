"""The copy of etcd's content after etcd was exchanged or has lost revisions."""

from __future__ import annotations

from typing import cast

import pytest

from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.etcd.v3 import etcd_pb2
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
    etcd, facts = Etcd(), Facts(KEYS)
    mirror = Mirror(cast(EtcdClient, etcd), facts)
    await mirror._read_all()
    etcd.base = 2000
    await mirror._read_all()
    assert facts.base == 1000, "a known revision of the same history is not read again"
    etcd.cluster_id, etcd.revision = cluster_id, revision
    await mirror._read_all()
    assert facts.base == 2000
