"""The URL of an etcd cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from duplane.fabric.addresses import parse_address

DEFAULT_PREFIX = "/duplane/"


@dataclass(frozen=True, kw_only=True)
class EtcdUrl:
    """The members of an etcd cluster, and the prefix of all keys that a fabric uses in it.

    The URL has the form `etcd://HOST:PORT[,HOST:PORT]?prefix=PREFIX`.
    """

    addresses: Sequence[str]
    prefix: str = DEFAULT_PREFIX

    @classmethod
    def parse(cls, url: str) -> EtcdUrl:
        """Parse a URL. Raises ValueError."""
        place, _, query = url.partition("?")
        if "@" in place:  # the message does not show the URL, which may contain a password
            raise ValueError("a URL with a user cannot be used; set store_user and store_password")
        parts = urlsplit(place)
        if parts.scheme != "etcd" or parts.path or parts.fragment:
            raise ValueError(f"{place!r} cannot be used")
        addresses = tuple(str(parse_address(one, "host")) for one in parts.netloc.split(","))
        match parse_qsl(query, keep_blank_values=True):
            case []:
                return cls(addresses=addresses)
            case [("prefix", prefix)] if prefix:
                return cls(addresses=addresses, prefix=prefix)
            case _:
                raise ValueError("nothing but ?prefix=PREFIX may follow the addresses")
