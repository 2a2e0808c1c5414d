"""The expected times for which sessions hold their slots."""

from __future__ import annotations

import pytest
from support.scheduler.scheduler_harness import AUDIO, CHAT, OMNI

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.hold_times import HoldTimes


def test_base_value_is_used_until_the_third_sample() -> None:
    times = HoldTimes()
    assert [times.expected_s(kind) for kind in (AUDIO, OMNI, CHAT)] == [120, 90, 15]
    times.add(AUDIO, 100)
    times.add(AUDIO, 200)
    assert times.expected_s(AUDIO) == 120
    times.add(AUDIO, 300)
    assert times.expected_s(AUDIO) == pytest.approx(0.7 * (0.7 * 100 + 0.3 * 200) + 0.3 * 300)
    assert times.expected_s(OMNI) == 90


def test_unknown_kind_is_expected_to_last_longest() -> None:
    assert HoldTimes().expected_s(lease_pb2.SESSION_KIND_UNSPECIFIED) == 120


def test_session_past_its_estimate_is_expected_to_end_soon() -> None:
    times = HoldTimes()
    assert times.remaining_s(AUDIO, 100) == 20
    assert times.remaining_s(AUDIO, 500) == 15
