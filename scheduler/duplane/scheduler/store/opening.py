"""Opens the lease store that a URL names."""

from __future__ import annotations

from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.key_files import StoreCredentials
from duplane.scheduler.store.base import LeaseStore
from duplane.scheduler.store.etcd.store import EtcdStore
from duplane.scheduler.store.memory import MemoryStore
from duplane.scheduler.store.url import parse_url


def open_store(url: str, boot_ms: int, credentials: StoreCredentials | None = None) -> LeaseStore:
    """Open the store that `url` names. `boot_ms` is the wall time at which this process started.

    The store uses the present `credentials`, also when their files change later.
    """
    cluster = parse_url(url)
    if cluster is None:
        return MemoryStore(boot_ms)
    client = EtcdClient(cluster.addresses, credentials.current if credentials else None)
    if credentials:
        credentials.on_change = client.use
    return EtcdStore(client, cluster.prefix, boot_ms)
