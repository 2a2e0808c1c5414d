"""The stages of a unit cover its whole time in the worker, whatever the model reports."""

from __future__ import annotations

import numpy as np
import pytest

from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.types import Unit
from duplane.worker.session.unit_spans import unit_stages


def unit(**times: float | tuple[float, float]) -> UnitRecord:
    """Return a unit that was received at 10 s and ran from 13 s to 15 s."""
    common: dict[str, float | tuple[float, float]] = {
        "received_s": 10.0,
        "queued_s": 10.5,
        "started_s": 13.0,
        "finished_s": 15.0,
        "busy_s": 2.0,
    }
    made = UnitRecord(Unit(0, np.zeros(0, np.float32)))
    for name, value in (common | times).items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("settle_s", "waits"),
    [
        ((0.0, 0.0), [("device", 10.5)]),
        ((9.0, 10.2), [("device", 10.5)]),
        ((10.2, 11.0), [("settle", 10.5), ("device", 11.0)]),
        ((11.0, 12.0), [("inbox", 10.5), ("settle", 11.0), ("device", 12.0)]),
        ((11.0, 13.0), [("inbox", 10.5), ("settle", 11.0)]),
        ((12.0, 14.0), [("inbox", 10.5), ("settle", 12.0)]),
        ((14.0, 15.0), [("inbox", 10.5)]),
    ],
)
def test_wait_is_divided_by_what_the_previous_unit_did(
    settle_s: tuple[float, float], waits: list[tuple[str, float]]
) -> None:
    stages = unit_stages(unit(settle_s=settle_s), {"decode": 2.0}, 15.5)
    assert stages == [("prepare", 10.0), *waits, ("decode", 13.0), ("deliver", 15.0)]


@pytest.mark.parametrize(
    ("stage_s", "stages"),
    [
        ({}, [("run", 13.0)]),
        ({"audio": 0.5, "decode": 1.0}, [("audio", 13.0), ("decode", 13.5), ("run", 14.5)]),
        ({"decode": 1.0, "audio": 1.0}, [("audio", 13.0), ("decode", 14.0)]),
        ({"decode": 9.0, "settle": 7.0}, [("decode", 13.0)]),
    ],
)
def test_stages_of_the_model_never_exceed_its_time(
    stage_s: dict[str, float], stages: list[tuple[str, float]]
) -> None:
    found = unit_stages(unit(), stage_s, 15.5)
    assert found == [("prepare", 10.0), ("device", 10.5), *stages, ("deliver", 15.0)]


def test_waits_between_launches_count_as_waits_for_the_device() -> None:
    found = unit_stages(unit(busy_s=0.75), {"audio": 0.25, "decode": 0.25}, 15.5)
    stages = [("device", 10.5), ("audio", 14.25), ("decode", 14.5), ("run", 14.75)]
    assert found == [("prepare", 10.0), *stages, ("deliver", 15.0)]
