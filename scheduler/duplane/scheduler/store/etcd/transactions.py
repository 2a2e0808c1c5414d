"""A transaction, which an operation of the store builds from the facts. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from duplane.scheduler.etcd.client import end_of
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.etcd.facts import Facts

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Done(Generic[Answer]):
    """The answer of an operation that changes nothing."""

    answer: Answer


@dataclass(slots=True)
class Transaction(Generic[Answer]):
    """The keys that must be unchanged, the changes to make, and the answer after the changes."""

    facts: Facts
    answer: Callable[[int], Answer]  # takes the revision that made the changes
    compares: list[etcd_pb2.Compare] = field(default_factory=list[etcd_pb2.Compare])
    changes: list[etcd_pb2.RequestOp] = field(default_factory=list[etcd_pb2.RequestOp])
    touched: set[bytes] = field(default_factory=set[bytes])  # keys that it requires or changes
    written: set[bytes] = field(default_factory=set[bytes])  # keys that it changes
    size: int = 0  # bytes of the values to write
    is_alone: bool = False  # not shared: too large, touches ranges of keys, or changes the base

    def require_unchanged(self, *keys: bytes) -> None:
        """Let the transaction fail if one of the keys is newer than in the facts."""
        self.touched.update(keys)
        self.compares += [
            etcd_pb2.Compare(
                key=key,
                target=etcd_pb2.Compare.MOD,
                result=etcd_pb2.Compare.EQUAL,
                mod_revision=self.facts.written_at(key),
            )
            for key in keys
        ]

    def require_none_newer(self, prefix: bytes) -> None:
        """Let the transaction fail if a key with this prefix is newer than the facts."""
        self.is_alone = True
        self.compares.append(
            etcd_pb2.Compare(
                key=prefix,
                range_end=end_of(prefix),
                target=etcd_pb2.Compare.MOD,
                result=etcd_pb2.Compare.LESS,
                mod_revision=self.facts.revision + 1,
            )
        )

    def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        """Set a key."""
        change = etcd_pb2.PutRequest(key=key, value=value, lease=lease)
        self._change(key, etcd_pb2.RequestOp(request_put=change))
        self.size += len(value)

    def delete(self, key: bytes) -> None:
        """Delete a key, whether it exists or not."""
        change = etcd_pb2.DeleteRangeRequest(key=key)
        self._change(key, etcd_pb2.RequestOp(request_delete_range=change))

    def delete_all(self, prefix: bytes) -> None:
        """Delete every key with a prefix."""
        change = etcd_pb2.DeleteRangeRequest(key=prefix, range_end=end_of(prefix))
        self.changes.append(etcd_pb2.RequestOp(request_delete_range=change))
        self.is_alone = True

    def _change(self, key: bytes, change: etcd_pb2.RequestOp) -> None:
        self.changes.append(change)
        self.touched.add(key)
        self.written.add(key)


Step = Done[Answer] | Transaction[Answer]
