"""Converts protobuf Duration and Timestamp to Python numbers, and seconds to Duration.

In Python, durations are seconds (float) and wall-clock times are nanoseconds since 1970 (int).
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_NS_PER_S = 1_000_000_000


def to_duration(seconds: float) -> Duration:
    """Convert seconds, rounded to nanoseconds. Values below zero become zero."""
    whole_s, rest_ns = divmod(max(0, round(seconds * _NS_PER_S)), _NS_PER_S)
    return Duration(seconds=whole_s, nanos=rest_ns)


def to_seconds(duration: Duration) -> float:
    """Convert a Duration to seconds. An absent field gives zero."""
    return duration.seconds + duration.nanos / _NS_PER_S


def to_wall_ns(timestamp: Timestamp) -> int:
    """Convert a Timestamp to wall-clock nanoseconds. An absent field gives zero."""
    return timestamp.seconds * _NS_PER_S + timestamp.nanos
