"""Converts the durations of the model's stages to a message and to span attributes."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.util.types import AttributeValue

from duplane.fabric.durations import to_duration
from duplane.fabric.monitoring import spans
from duplane.fabric.v1 import session_pb2

_STAGES = frozenset(field.name for field in session_pb2.StageTimes.DESCRIPTOR.fields)


def stage_times(stages_s: Mapping[str, float]) -> session_pb2.StageTimes:
    """Convert the seconds of each stage to a message, without the stages that did not run."""
    return session_pb2.StageTimes(
        **{
            stage: to_duration(seconds)
            for stage, seconds in stages_s.items()
            if seconds and stage in _STAGES
        }
    )


def stage_attributes(stages_s: Mapping[str, float]) -> dict[str, AttributeValue]:
    """Convert the seconds of each stage to a span attribute in milliseconds."""
    return {
        f"{spans.STAGE_PREFIX}{stage}_ms": seconds * 1e3
        for stage, seconds in stages_s.items()
        if seconds
    }
