"""Conversion of seconds and wall-clock times to and from messages of the contract."""

from __future__ import annotations

import math

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from duplane.fabric.durations import to_duration, to_seconds, to_wall_ns


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.1, 1.0, 59.999999999, 86_400.5])
def test_seconds_survive_the_way_there_and_back(seconds: float) -> None:
    assert to_seconds(to_duration(seconds)) == pytest.approx(seconds, rel=1e-12)


def test_seconds_are_rounded_to_nanoseconds_with_carry() -> None:
    assert to_duration(0.9999999999) == Duration(seconds=1)
    assert to_duration(0.29) == Duration(nanos=290_000_000)


def test_negative_seconds_become_zero() -> None:
    assert to_duration(-0.5) == Duration()


@pytest.mark.parametrize("seconds", [math.inf, math.nan])
def test_seconds_that_are_not_finite_are_refused(seconds: float) -> None:
    with pytest.raises((ValueError, OverflowError)):
        to_duration(seconds)


def test_wall_time_keeps_every_nanosecond() -> None:
    wall_ns = 1_795_000_000_123_456_789
    timestamp = Timestamp()
    timestamp.FromNanoseconds(wall_ns)
    assert to_wall_ns(timestamp) == wall_ns
