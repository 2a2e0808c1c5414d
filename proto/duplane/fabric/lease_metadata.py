"""The lease of a call to a worker in the metadata of the call.

The worker checks it before it reads the first message, which may be large. The same lease is also
in the first message, for workers of older releases.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2

KEY = "duplane-lease-bin"


def with_lease(lease: lease_pb2.Lease) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata of a call that uses this lease."""
    return ((KEY, lease.SerializeToString()),)


def lease_of(metadata: Iterable[tuple[str, str | bytes]]) -> lease_pb2.Lease | None:
    """Return the lease in the metadata of a call, or None if there is none.

    Raises FabricError if it cannot be read.
    """
    values = [value for key, value in metadata if key == KEY]
    if not values:
        return None
    value = values[0]
    try:
        if len(values) == 1 and isinstance(value, bytes):
            return lease_pb2.Lease.FromString(value)
    except DecodeError:
        pass
    message = f"the metadata {KEY} is no lease"
    raise FabricError(Reason.INVALID_FIELD, message, field=KEY)
