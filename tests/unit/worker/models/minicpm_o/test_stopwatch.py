"""The times of stages on the host, and on a device that works asynchronously."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.clock import Clock

from duplane.worker.models.minicpm_o import stopwatch
from duplane.worker.models.minicpm_o.stopwatch import Stopwatch


@dataclass
class DeviceClock(Clock):
    """The host's time, and the device's queue of work, which runs in order."""

    device_free_s: float = 0.0

    def launch(self, seconds: float) -> None:
        """Queue work that keeps the device busy for `seconds`."""
        self.device_free_s = max(self.device_free_s, self.now_s) + seconds

    def wait(self) -> None:
        """Let the host wait until the device has done its queued work."""
        self.now_s = max(self.now_s, self.device_free_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    clock = DeviceClock()

    class Event:
        """An event of the stream, reached when the work queued before the event is done."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.reached_s = 0.0

        def record(self) -> None:
            self.reached_s = max(clock.device_free_s, clock.now_s)

        def query(self) -> bool:
            return self.reached_s <= clock.now_s

        def elapsed_time(self, later: Event) -> float:
            assert self.query()
            assert later.query(), "torch refuses an event that the device has not reached"
            return (later.reached_s - self.reached_s) * 1e3

    monkeypatch.setattr(stopwatch, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: pytest.fail("the host waits"))
    return clock


def test_parts_of_a_stage_add_up_on_a_cpu(clock: DeviceClock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    for stage, seconds in (("flow", 1.0), ("HiFT", 2.0), ("flow", 3.0)):
        clock.now_s += seconds
        watch.lap(stage)
    clock.now_s += 0.5
    assert watch.seconds() == {"flow": 4.0, "HiFT": 2.0}
    watch.lap("HiFT")
    assert watch.seconds() == {"flow": 4.0, "HiFT": 2.5}


def test_work_of_the_device_counts_for_the_stage_that_queued_it(clock: DeviceClock) -> None:
    watch = Stopwatch(torch.device("cuda"))
    for stage, seconds in (("audio", 1.0), ("prefill", 2.0), ("decode", 0.25)):
        clock.now_s += 0.125
        clock.launch(seconds)
        watch.lap(stage)
    clock.wait()
    assert watch.seconds() == {"audio": 1.125, "prefill": 2.0, "decode": 0.25}


def test_a_stage_that_the_device_has_not_finished_lasts_until_now(clock: DeviceClock) -> None:
    watch = Stopwatch(torch.device("cuda"))
    clock.launch(1.0)
    watch.lap("audio")
    clock.launch(5.0)
    watch.lap("prefill")
    clock.now_s += 3.0
    watch.lap("decode")
    assert watch.seconds() == {"audio": 1.0, "prefill": 2.0, "decode": 0.0}


def test_a_stage_in_which_the_host_waits_for_earlier_batches_includes_the_wait(
    clock: DeviceClock,
) -> None:
    clock.launch(4.0)
    watch = Stopwatch(torch.device("cuda"))
    clock.launch(1.0)
    clock.wait()
    watch.lap("prefill")
    assert watch.seconds() == {"prefill": 5.0}


def test_part_of_two_stages_counts_for_both(clock: DeviceClock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    for stages, seconds in ((("talker", "condition"), 1.0), (("talker",), 2.0)):
        clock.now_s += seconds
        watch.lap(*stages)
    assert watch.seconds() == {"talker": 3.0, "condition": 1.0}
