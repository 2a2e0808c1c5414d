"""A model runs in two lanes only if both give the same at the same time as one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model.fake_cuda import DEVICE, elsewhere
from support.time_limits import WITHIN_S

from duplane.worker.models.families import open_device
from duplane.worker.models.interface import DeviceLostError
from duplane.worker.models.minicpm_o import two_lanes
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.two_lanes import choose_lane_count
from duplane.worker.settings import WorkerSettings

pytestmark = pytest.mark.slow

REFUSED = "1 of 1 second lanes are switched off, which costs speed: speech beside the LLM: "


def enter(name: str) -> AbstractContextManager[None]:
    return nullcontext()


Change = Callable[[str, Callable[[], float]], None]


@pytest.fixture
def change(model: DuplexModel, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Return what adds a number to a result of a lane, unless the lane runs alone."""
    monkeypatch.setattr(two_lanes, "SLOTS", (2,))
    places: dict[str, tuple[Any, str]] = {
        "llm": (model.parts.audio, "encode"),
        "speech": (model.parts.talker, "condition"),
    }

    def change(lane: str, number: Callable[[], float]) -> None:
        owner, name = places[lane]
        call, calls = getattr(owner, name), 0

        def changed(*given: Any) -> Any:
            nonlocal calls
            calls += 1  # the first call is in the trial of one lane after the other
            return call(*given) if calls == 1 else call(*given) + number()

        monkeypatch.setattr(owner, name, changed)

    return change


def assert_clean(model: DuplexModel) -> None:
    assert all(model.is_clean(slot) for slot in range(model.slot_count))


def test_model_that_gives_the_same_in_both_runs_in_two_lanes(
    model: DuplexModel, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = threading.Barrier(2)  # breaks if the lanes do not run at the same time
    for lane in ("llm", "speech"):
        change(lane, lambda: 0.0 * meeting.wait(WITHIN_S))
    assert choose_lane_count(2, model, enter) == 2
    assert not caplog.records
    assert_clean(model)


@pytest.mark.parametrize("lane", ["llm", "speech"])
def test_a_difference_in_a_lane_switches_the_second_one_off(
    model: DuplexModel, change: Change, caplog: pytest.LogCaptureFixture, lane: str
) -> None:
    change(lane, lambda: 1e-3)
    assert choose_lane_count(2, model, enter) == 1
    (message,) = caplog.messages
    assert message.startswith(f"{REFUSED}differs by ")
    assert_clean(model)


def test_an_error_in_a_lane_switches_the_second_one_off(
    model: DuplexModel, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> float:
        raise RuntimeError("no second stream\nmore lines")

    change("speech", refuse)
    assert choose_lane_count(2, model, enter) == 1
    assert caplog.messages == [f"{REFUSED}no second stream"]
    assert_clean(model)


def test_launches_that_do_not_end_are_a_lost_device(
    model: DuplexModel, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def wait_for_one(results: Collection[Any], limit_s: float) -> Any:
        return wait(results, limit_s if len(results) == 1 else 0.0)

    monkeypatch.setattr(two_lanes, "wait", wait_for_one)
    change("speech", lambda: 1.0 * is_over.wait(WITHIN_S))
    with pytest.raises(DeviceLostError, match="llm beside speech have not ended"):
        choose_lane_count(2, model, enter)
    is_over.set()
    for thread in threading.enumerate():
        if thread.name.endswith(" trial"):
            thread.join(WITHIN_S)


@pytest.mark.parametrize("lanes", ["auto", 1])
def test_a_cpu_has_one_lane_unless_two_are_asked_for(
    model: DuplexModel, caplog: pytest.LogCaptureFixture, lanes: Any
) -> None:
    assert choose_lane_count(lanes, model, enter) == 1
    assert not caplog.records


@pytest.mark.parametrize(("lanes", "count"), [("auto", 2), (1, 1)])
def test_a_gpu_has_two_lanes_unless_one_is_asked_for(
    speaking_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, lanes: Any, count: int
) -> None:
    monkeypatch.setattr(two_lanes, "SLOTS", (2,))
    monkeypatch.setattr(two_lanes, "REPEATS", 1)
    settings = WorkerSettings(
        checkpoint=speaking_checkpoint,
        device=DEVICE,
        slot_count=2,
        context_token_limit=256,
        turn_row_limit=128,
        threads=1,
        lanes=lanes,
        cuda_graphs=False,
    )
    with elsewhere(), torch.inference_mode():
        _, model = open_device(settings).load()
        assert model.constants.lane_count == count
        assert all(model.is_clean(slot) for slot in range(2))
