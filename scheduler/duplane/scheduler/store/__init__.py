"""Lease stores: an interface in `base`, and its implementations in memory and with etcd."""

from __future__ import annotations

from duplane.scheduler.etcd.access import Credentials, EtcdUrl
from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.store.base import LeaseStore
from duplane.scheduler.store.etcd.store import EtcdStore
from duplane.scheduler.store.memory import MemoryStore


def check_url(url: str) -> None:
    """Raise ValueError unless `url` names a store."""
    _parse(url)


def open_store(url: str, boot_ms: int, credentials: Credentials | None = None) -> LeaseStore:
    """Open the store that `url` names. `boot_ms` is the wall time at which this process started."""
    cluster = _parse(url)
    if cluster is None:
        return MemoryStore(boot_ms)
    client = EtcdClient(cluster.addresses, credentials or Credentials())
    return EtcdStore(client, cluster.prefix, boot_ms)


def _parse(url: str) -> EtcdUrl | None:
    """Return the etcd cluster that a URL names; None for the store in memory."""
    if url == "memory:":
        return None
    try:
        return EtcdUrl.parse(url)
    except ValueError as error:
        message = f"store: {error}; use memory: or etcd://HOST:PORT[,HOST:PORT]?prefix=PREFIX"
        raise ValueError(message) from None
