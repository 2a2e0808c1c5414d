"""The URL of a lease store."""

from __future__ import annotations

from duplane.scheduler.etcd.url import EtcdUrl


def check_url(url: str) -> None:
    """Raise ValueError unless `url` names a store."""
    parse_url(url)


def parse_url(url: str) -> EtcdUrl | None:
    """Return the etcd cluster that a URL names; None for the store in memory.

    Raises ValueError.
    """
    if url == "memory:":
        return None
    try:
        return EtcdUrl.parse(url)
    except ValueError as error:
        message = f"store: {error}; use memory: or etcd://HOST:PORT[,HOST:PORT]?prefix=PREFIX"
        raise ValueError(message) from None
