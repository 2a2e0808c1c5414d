"""The format of a model comes from its description; what the description lacks has a default."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat, is_same_model
from duplane.fabric.v1 import model_pb2, session_pb2

SHORT = model_pb2.Model(
    name="echo",
    context_token_limit=8192,
    digest="sha256:1",
    unit_duration=Duration(nanos=80_000_000),
    input_rate_hertz=24_000,
    output_rate_hertz=12_000,
    accepts_pictures=False,
)
# The same model as a worker of an older release describes it.
OLD = model_pb2.Model(name="m", parameter_count=4, context_token_limit=8192)
NEW = model_pb2.Model(
    name="m",
    parameter_count=4,
    context_token_limit=8192,
    digest="sha256:2",
    unit_duration=Duration(seconds=1),
    input_rate_hertz=16_000,
    output_rate_hertz=24_000,
    accepts_pictures=True,
)


def test_absent_fields_have_defaults() -> None:
    assert ModelFormat.of(model_pb2.Model()) == ModelFormat.of(NEW) == DEFAULT_FORMAT
    assert (DEFAULT_FORMAT.unit_s, DEFAULT_FORMAT.unit_sample_count) == (1.0, 16_000)


def test_short_unit_has_few_samples() -> None:
    short = ModelFormat.of(SHORT)
    assert (short.unit_s, short.unit_sample_count) == (0.08, 1920)
    assert short.samples_of_unit(16_000) == 1280


@pytest.mark.parametrize("count", [0, 1, 4, 32])
def test_bounds_in_seconds_are_units_of_one_second(count: int) -> None:
    assert DEFAULT_FORMAT.unit_count(count) == count


def test_bounds_in_seconds_are_more_units_if_units_are_short() -> None:
    short = ModelFormat.of(SHORT)
    assert [short.unit_count(seconds) for seconds in (0, 1, 4, 32)] == [0, 13, 50, 400]
    assert ModelFormat(unit_ns=10 * 10**9).unit_count(4) == 1


@pytest.mark.parametrize("count", [0, 6_000])
def test_speech_of_older_workers_is_measured_by_its_bytes(count: int) -> None:
    speech = session_pb2.Speech(audio=bytes(4 * 6_000), sample_count=count)
    assert DEFAULT_FORMAT.speech_s(speech) == 0.25
    assert ModelFormat.of(SHORT).speech_s(speech) == 0.5


def test_worker_of_an_older_release_may_have_the_same_model() -> None:
    assert is_same_model(OLD, NEW)
    assert is_same_model(NEW, OLD)
    assert is_same_model(NEW, NEW)


def test_models_that_differ_only_in_speech_requests_are_the_same() -> None:
    other = model_pb2.Model(accepts_speech_requests=True)
    other.MergeFrom(NEW)
    assert is_same_model(NEW, other)
    assert is_same_model(other, NEW)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "n"},
        {"parameter_count": 5},
        {"context_token_limit": 4096},
        {"digest": "sha256:3"},
        {"unit_duration": Duration(nanos=80_000_000)},
        {"input_rate_hertz": 24_000},
        {"output_rate_hertz": 16_000},
        {"accepts_pictures": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_model_with_another_value_is_another_model(change: dict[str, Any]) -> None:
    other = model_pb2.Model()
    other.CopyFrom(NEW)
    for name in change:
        other.ClearField(name)
    other.MergeFrom(model_pb2.Model(**change))
    assert not is_same_model(NEW, other)
    assert not is_same_model(other, NEW)
