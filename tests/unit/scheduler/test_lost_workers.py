"""A worker whose registration ends is lost, unless it has announced its end."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import pytest

from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.lost_workers import KEPT_S, MAX_COUNT, REPORT_AFTER_S
from duplane.scheduler.metrics import SchedulerMetrics
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Worker, WorkerGone, WorkerPut

OCCUPIED = registry_pb2.SLOT_STATE_OCCUPIED


def worker(name: str = "w", address: str = "host:1", epoch: int = 1) -> Worker:
    slots = [
        registry_pb2.SlotReport(slot=0, state=OCCUPIED, session_id="s1"),
        registry_pb2.SlotReport(slot=1, state=registry_pb2.SLOT_STATE_FREE),
    ]
    register = registry_pb2.Register(worker_id=name, address=address, slots=slots)
    return Worker.of(epoch, register)


@dataclass
class Fabric:
    """The state of a scheduler, with a clock that tests move."""

    now: float = 100.0
    forgotten: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.state = SchedulerState(lambda: self.now)
        self.lost = self.state.lost_workers
        self.lost.listeners.append(self.forgotten.append)
        self._registry = SchedulerMetrics(self.state).registry

    def attach(self, one: Worker) -> None:
        self.state.apply(WorkerPut(1, one))

    def end(self, one: Worker) -> None:
        self.state.apply(WorkerGone(1, one))

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.lost.advance()

    @property
    def gauge(self) -> float | None:
        return self._registry.get_sample_value("duplane_workers", {"state": "lost"})


def test_lost_worker_is_kept_and_counted_for_ten_minutes() -> None:
    fabric, gone = Fabric(), worker()
    fabric.attach(gone)
    fabric.now += 7
    fabric.end(gone)
    lost = fabric.lost.get("w")
    assert lost
    assert (lost.worker, lost.attached_s, lost.lost_at) == (gone, 7, 107)
    assert fabric.gauge == 1
    fabric.pass_s(KEPT_S - 1)
    assert fabric.gauge == 1
    fabric.pass_s(1)
    assert fabric.gauge == 0
    assert not fabric.lost.get("w")
    assert fabric.forgotten == ["w"]


def test_worker_that_has_announced_its_end_is_not_lost() -> None:
    fabric = Fabric()
    fabric.attach(worker())
    fabric.end(replace(worker(), is_leaving=True))
    assert not len(fabric.lost)
    assert fabric.gauge == 0


@pytest.mark.parametrize(
    ("back", "is_lost"),
    [
        (worker(epoch=2), False),
        (worker("restarted", epoch=2), False),
        (worker("other", "host:2", epoch=2), True),
    ],
    ids=["same id", "same address", "another worker"],
)
def test_worker_is_no_longer_lost_when_it_or_its_replacement_is_back(
    back: Worker, is_lost: bool
) -> None:
    fabric = Fabric()
    fabric.attach(worker())
    fabric.end(worker())
    fabric.attach(back)
    assert bool(fabric.lost.get("w")) == is_lost
    assert fabric.forgotten == ([] if is_lost else ["w"])


@pytest.mark.parametrize(
    ("other", "is_lost"),
    [
        (worker("restarted", epoch=2), False),
        (worker("restarted", "host:2", epoch=2), True),
        (worker("earlier", epoch=0), True),
    ],
    ids=["same address", "another address", "registered earlier"],
)
def test_worker_whose_replacement_attached_before_its_registration_ended_is_not_lost(
    other: Worker, is_lost: bool
) -> None:
    fabric, frozen = Fabric(), replace(worker(), is_silent=True)
    fabric.attach(frozen)
    fabric.attach(other)
    fabric.end(frozen)
    assert bool(fabric.lost.get("w")) == is_lost
    assert fabric.gauge == is_lost


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"is_silent": True}, "it sent no more reports, and its connection was closed"),
        ({"is_unreachable": True}, "edges could not connect to it"),
        ({}, "its connection to the scheduler broke, and it has not attached again"),
    ],
)
def test_the_log_has_the_reason_and_the_sessions_once(
    flags: dict[str, bool], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = Fabric()
    fabric.attach(worker())
    fabric.end(replace(worker(), **flags))
    fabric.pass_s(REPORT_AFTER_S - 0.1)
    assert not caplog.records, "the worker may attach to another scheduler"
    fabric.pass_s(0.1)
    fabric.pass_s(1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    assert said.startswith(f"worker w at host:1 is lost: {reason}")
    assert said.endswith("it had 1 sessions: s1")


def test_worker_that_is_back_soon_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    fabric = Fabric()
    fabric.attach(worker())
    fabric.end(worker())
    fabric.attach(worker(epoch=2))
    fabric.pass_s(REPORT_AFTER_S)
    assert not caplog.records


def test_the_number_of_lost_workers_is_bounded() -> None:
    fabric = Fabric()
    for number in range(MAX_COUNT + 1):
        one = worker(f"w{number}", f"host:{number}")
        fabric.attach(one)
        fabric.end(one)
    assert len(fabric.lost) == MAX_COUNT
    assert fabric.forgotten == ["w0"]
