"""The address of an etcd cluster and the credentials of its clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

import grpc

from duplane.fabric.addresses import parse_address

DEFAULT_PREFIX = "/duplane/"


@dataclass(frozen=True, kw_only=True)
class EtcdUrl:
    """`etcd://HOST:PORT[,HOST:PORT]?prefix=PREFIX`: the members, and the part of the key space."""

    addresses: Sequence[str]
    prefix: str = DEFAULT_PREFIX

    @classmethod
    def parse(cls, url: str) -> EtcdUrl:
        """Parse a URL. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme != "etcd" or parts.path or parts.fragment:
            raise ValueError(f"{url!r} cannot be used")
        addresses = tuple(str(parse_address(one, "host")) for one in parts.netloc.split(","))
        query = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        )
        prefix = query.pop("prefix", DEFAULT_PREFIX)
        if query or not prefix:
            raise ValueError(f"{url!r} cannot be used")
        return cls(addresses=addresses, prefix=prefix)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """TLS and the user of a client. Without `tls` connections are not encrypted."""

    tls: grpc.ChannelCredentials | None = None
    user: str = ""
    password: str = ""
