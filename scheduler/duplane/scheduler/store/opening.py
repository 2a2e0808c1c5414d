"""Opens the lease store that a URL names."""

from __future__ import annotations

from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.etcd.credentials import Credentials
from duplane.scheduler.store.base import LeaseStore
from duplane.scheduler.store.etcd.store import EtcdStore
from duplane.scheduler.store.memory import MemoryStore
from duplane.scheduler.store.url import parse_url


def open_store(url: str, boot_ms: int, credentials: Credentials | None = None) -> LeaseStore:
    """Open the store that `url` names. `boot_ms` is the wall time at which this process started."""
    cluster = parse_url(url)
    if cluster is None:
        return MemoryStore(boot_ms)
    client = EtcdClient(cluster.addresses, credentials or Credentials())
    return EtcdStore(client, cluster.prefix, boot_ms)
