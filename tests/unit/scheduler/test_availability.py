"""A scheduler without contact to its store says why it refuses calls."""

from __future__ import annotations

from collections.abc import Callable

from duplane.scheduler.availability import Availability
from duplane.scheduler.store.memory import MemoryStore


class FailingStore(MemoryStore):
    """A store whose contact a test can lose, and that can refuse changes."""

    def watch_contact(self, listener: Callable[[bool], None]) -> None:
        self.lose = listener

    def watch_refusal(self, listener: Callable[[str], None]) -> None:
        self.refuse_changes = listener


class Part:
    """A part of a scheduler."""

    def __init__(self) -> None:
        self.why = ""

    def refuse(self, why: str) -> None:
        self.why = why


def test_refusal_of_the_store_is_the_reason_of_a_lost_contact() -> None:
    store, part = FailingStore(boot_ms=1), Part()
    availability = Availability(store, part)
    store.refuse_changes("etcd is full")
    assert availability.is_serving
    store.lose(True)
    assert (availability.is_serving, part.why) == (False, "etcd is full")
    store.refuse_changes("")
    store.lose(False)
    assert (availability.is_serving, part.why) == (True, "")
    store.lose(True)
    assert part.why == "the scheduler has no contact to its store"
