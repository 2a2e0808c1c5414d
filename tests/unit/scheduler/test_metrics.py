"""The metrics count a ticket once if another request takes it over, and show a lost contact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.metrics import SchedulerMetrics
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Ticket, TicketGone, TicketPut
from duplane.scheduler.store.measured import MeasuredStore
from duplane.scheduler.store.memory import MemoryStore

AUDIO, CHAT = lease_pb2.SESSION_KIND_AUDIO_DUPLEX, lease_pb2.SESSION_KIND_CHAT
ORDER = 5


def ticket(request_id: str, pool: str, kind: lease_pb2.SessionKind) -> Ticket:
    request = lease_pb2.AcquireLeaseRequest(request_id=request_id, pool=pool, kind=kind)
    return Ticket(ORDER, "owner", request)


@pytest.mark.parametrize(("pool", "kind"), [("", AUDIO), ("x", CHAT)], ids=["pool", "kind"])
def test_ticket_that_moves_to_another_pool_or_kind_is_counted_once(
    pool: str, kind: lease_pb2.SessionKind
) -> None:
    now = 100.0
    state = SchedulerState(lambda: now)
    registry = SchedulerMetrics(state).registry

    def waiting() -> float:
        found = [
            sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "duplane_queue_tickets"
        ]
        assert min(found) >= 0
        return sum(found)

    def oldest() -> float | None:
        return registry.get_sample_value("duplane_queue_oldest_wait_seconds", {"pool": "other"})

    state.apply(TicketPut(1, ticket("first", "x", AUDIO)))
    assert waiting() == 1
    state.apply(TicketPut(2, ticket("second", pool, kind)))
    assert waiting() == 1
    state.apply(TicketGone(3, ticket("second", pool, kind), is_granted=False))
    now += 10
    assert waiting() == 0
    assert not oldest()


def test_expected_pool_has_its_name_in_the_metrics_also_without_workers() -> None:
    state = SchedulerState(lambda: 100.0, ["x"])
    registry = SchedulerMetrics(state).registry

    def tickets(pool: str) -> float | None:
        labels = {"pool": pool, "kind": "audio_duplex"}
        return registry.get_sample_value("duplane_queue_tickets", labels)

    assert (tickets("x"), tickets("other")) == (0, None)
    state.apply(TicketPut(1, ticket("first", "x", AUDIO)))
    assert (tickets("x"), tickets("other")) == (1, None)
    labels = {"role": "scheduler", "pool": "x", "state": "free"}
    assert registry.get_sample_value("duplane_slots", labels) == 0


class LosableStore(MemoryStore):
    """A store whose contact a test can lose."""

    def watch_contact(self, listener: Callable[[bool], None]) -> None:
        self.lose = listener

    def watch_refusal(self, listener: Callable[[str], None]) -> None:
        self.refuse = listener


def test_store_that_refuses_changes_is_shown() -> None:
    store = LosableStore(boot_ms=1)
    registry = CollectorRegistry()
    MeasuredStore(store, registry)
    seen = [registry.get_sample_value("duplane_store_writable")]
    for refusal in ("etcd is full", ""):
        store.refuse(refusal)
        seen.append(registry.get_sample_value("duplane_store_writable"))
    assert seen == [1, 0, 1]


def test_lost_contact_to_the_store_is_shown_and_counted() -> None:
    store = LosableStore(boot_ms=1)
    registry = CollectorRegistry()
    MeasuredStore(store, registry)

    def seen() -> tuple[float | None, float | None]:
        read = registry.get_sample_value
        return read("duplane_store_contact"), read("duplane_store_contact_losses_total")

    assert seen() == (1, 0)
    store.lose(True)
    assert seen() == (0, 1)
    store.lose(False)
    assert seen() == (1, 1)
