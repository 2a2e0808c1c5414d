"""Fills an etcd cluster up to its quota, and makes room again in a cluster of one member."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from support.time_limits import WITHIN_S

from duplane.scheduler.etcd.client import EtcdClient, FullError
from duplane.scheduler.etcd.v3 import etcd_pb2

QUOTA_BYTES = 1_000_000
QUOTA_FLAGS = ("--quota-backend-bytes", str(QUOTA_BYTES))
_KEY = b"/filling"
_VALUE = bytes(100_000)


async def fill(client: EtcdClient) -> None:
    """Write values until etcd refuses them. etcd then has the alarm NOSPACE."""
    for _ in range(100):
        try:
            await client.put(_KEY, _VALUE)
        except FullError:
            return
    raise AssertionError("etcd has no quota")


async def make_room(client: EtcdClient) -> None:
    """Delete old revisions, defragment, and clear the alarm.

    `etcd_pb2` lacks the messages of these methods, so other messages with the same fields are sent.
    """
    header = (await client.read(_KEY)).header
    # The fields are the revision, and `physical`: answer after the revisions left the file.
    compact = etcd_pb2.ResponseHeader(cluster_id=header.revision, member_id=1)
    await _call(client, "KV/Compact", compact)
    await _call(client, "Maintenance/Defragment", etcd_pb2.StatusRequest())
    # The fields are the action DEACTIVATE, the member, and the alarm NOSPACE.
    disarm = etcd_pb2.ResponseHeader(cluster_id=2, member_id=header.member_id, revision=1)
    await _call(client, "Maintenance/Alarm", disarm)


async def _call(client: EtcdClient, method: str, request: Message) -> None:
    channel = client.endpoints.pick().channel
    send: Any = channel.unary_unary(
        f"/etcdserverpb.{method}", request_serializer=type(request).SerializeToString
    )
    await send(request, timeout=WITHIN_S)
