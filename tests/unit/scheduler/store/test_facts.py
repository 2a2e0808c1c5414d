"""The local copy of etcd's content, for events that no correct scheduler writes."""

from __future__ import annotations

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.base import Ticket
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.keys import Keys
from duplane.scheduler.store.etcd.records import request_value

KEYS = Keys("/test/")
ORDER = 5


def put(name: str, revision: int) -> etcd_pb2.Event:
    request = lease_pb2.AcquireLeaseRequest(request_id=name)
    value = request_value(Ticket(ORDER, "owner", request), 0, is_granted=False)
    held = etcd_pb2.KeyValue(key=KEYS.request(name), value=value, mod_revision=revision)
    return etcd_pb2.Event(kv=held)


def deleted(name: str) -> etcd_pb2.Event:
    return etcd_pb2.Event(type=etcd_pb2.Event.DELETE, kv=etcd_pb2.KeyValue(key=KEYS.request(name)))


def test_two_requests_at_one_order_can_both_end() -> None:
    facts = Facts(KEYS)
    facts.apply([put("first", 10)], 10)
    facts.apply([put("second", 11)], 11)
    facts.apply([deleted("second")], 12)
    facts.apply([deleted("first")], 13)
    assert not facts.tickets
    assert not facts.requests
