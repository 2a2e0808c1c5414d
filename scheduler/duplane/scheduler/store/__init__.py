"""Where leases are kept: one interface, one engine per file."""

from __future__ import annotations

from duplane.scheduler.store.base import LeaseStore
from duplane.scheduler.store.memory import MemoryStore


def check_url(url: str) -> None:
    """Raise ValueError unless `url` names an engine of this version."""
    if url.startswith("etcd:"):
        raise ValueError("store: 'etcd:' is not available in this version; use 'memory:'")
    if url != "memory:":
        raise ValueError(f"store: {url!r} is not a store; use 'memory:'")


def open_store(url: str, boot_ms: int) -> LeaseStore:
    """Open the store that `url` names; `boot_ms` is when this process started, wall time."""
    check_url(url)
    return MemoryStore(boot_ms)
