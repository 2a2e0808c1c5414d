"""The local copy of etcd's content, for events that no correct scheduler writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    Ticket,
    TicketGone,
)
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.keys import Keys
from duplane.scheduler.store.etcd.records import Slot, request_value, slot_value

KEYS = Keys("/test/")
ORDER = 5


def apply(facts: Facts, events: Iterable[etcd_pb2.Event], revision: int) -> list[Change]:
    return [change for change in facts.apply(events, revision) if change]


def replace(facts: Facts, held: Sequence[etcd_pb2.KeyValue], revision: int) -> list[Change]:
    return [change for change in facts.replace(held, revision) if change]


def put(name: str, revision: int) -> etcd_pb2.Event:
    request = lease_pb2.AcquireLeaseRequest(request_id=name)
    value = request_value(Ticket(ORDER, "owner", request), 0, is_granted=False)
    held = etcd_pb2.KeyValue(key=KEYS.request(name), value=value, mod_revision=revision)
    return etcd_pb2.Event(kv=held)


def deleted(name: str) -> etcd_pb2.Event:
    return etcd_pb2.Event(type=etcd_pb2.Event.DELETE, kv=etcd_pb2.KeyValue(key=KEYS.request(name)))


def test_two_requests_at_one_order_can_both_end() -> None:
    facts = Facts(KEYS)
    apply(facts, [put("first", 10)], 10)
    apply(facts, [put("second", 11)], 11)
    apply(facts, [deleted("second")], 12)
    apply(facts, [deleted("first")], 13)
    assert not facts.tickets
    assert not facts.requests


def held(number: int, epoch: int, ticket: Ticket | None) -> etcd_pb2.KeyValue:
    claims = lease_pb2.LeaseClaims(
        lease_id="lease", worker_id="w", worker_epoch=epoch, fencing_number=number
    )
    value = slot_value(Slot(Grant(claims, ticket, is_claimed=True), 5.0, None), 0)
    return etcd_pb2.KeyValue(key=KEYS.slot(("w", 0)), value=value, mod_revision=epoch + number)


@pytest.mark.parametrize("epoch", [1, 2], ids=["same registration", "later registration"])
def test_lease_that_was_adopted_after_missed_events_is_another_grant(epoch: int) -> None:
    facts = Facts(KEYS)
    granted = held(10, 1, Ticket(ORDER, "owner", lease_pb2.AcquireLeaseRequest(request_id="r")))
    apply(facts, [etcd_pb2.Event(kv=granted)], 11)
    adopted = held(10, epoch, None)
    adopted.mod_revision = 20
    changes = replace(facts, [adopted], 20)
    assert [type(change) for change in changes] == [GrantGone, GrantPut]


def test_ticket_that_ended_in_missed_events_may_still_be_waited_for() -> None:
    facts = Facts(KEYS)
    session = etcd_pb2.KeyValue(key=KEYS.session("0"), mod_revision=9)  # the ticket's
    apply(facts, [etcd_pb2.Event(kv=session)], 9)
    apply(facts, [put("request", 10)], 10)
    (change,) = replace(facts, [session], 20)
    assert isinstance(change, TicketGone)
    assert change.is_expired


def test_request_that_moved_to_another_slot_in_missed_events_has_its_live_grant() -> None:
    facts = Facts(KEYS)
    ticket = Ticket(ORDER, "owner", lease_pb2.AcquireLeaseRequest(request_id="r"))

    def slot(index: int, number: int, end: GrantEnd | None) -> etcd_pb2.KeyValue:
        claims = lease_pb2.LeaseClaims(
            lease_id=f"lease {index}", worker_id="w", slot=index, fencing_number=number
        )
        value = slot_value(Slot(Grant(claims, ticket), 5.0, end), 0)
        revision = number + (end is not None)
        return etcd_pb2.KeyValue(key=KEYS.slot(("w", index)), value=value, mod_revision=revision)

    replace(facts, [slot(1, 10, None)], 10)
    replace(facts, [slot(0, 20, None), slot(1, 10, GrantEnd.EXPIRED)], 20)
    assert facts.granted["r"].claims.lease_id == "lease 0"
    replace(facts, [slot(0, 20, GrantEnd.EXPIRED), slot(1, 10, GrantEnd.EXPIRED)], 21)
    assert not facts.granted
