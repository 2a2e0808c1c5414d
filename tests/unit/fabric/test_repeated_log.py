"""A lasting condition is logged when it begins, then rarely, and when it ends."""

from __future__ import annotations

import logging

import pytest
from support.clock import Clock

from duplane.fabric.repeated_log import RepeatedLog


def test_condition_that_lasts_is_logged_at_growing_intervals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock(100.0)
    condition = RepeatedLog(logging.getLogger("test"), clock)
    logged_at: list[float] = []
    for second in range(0, 3600, 3):
        clock.now_s = 100.0 + second
        caplog.clear()
        condition.report("the scheduler does not answer")
        logged_at += [second] * len(caplog.records)
    assert logged_at == [0, 60, 180, 420, 900, 1860]


def test_skipped_reports_are_counted_and_the_end_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock(100.0)
    condition = RepeatedLog(logging.getLogger("test"), clock)
    condition.resolve("the scheduler answers")
    for second in (0, 3, 6, 60):
        clock.now_s = 100.0 + second
        condition.report("the scheduler does not answer")
    condition.resolve("the scheduler answers")
    condition.report("the scheduler does not answer")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "the scheduler does not answer"),
        ("WARNING", "the scheduler does not answer (2 more times)"),
        ("INFO", "the scheduler answers after 60 s"),
        ("WARNING", "the scheduler does not answer"),
    ]
