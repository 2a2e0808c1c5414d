"""The first hour on a GPU: it is rehearsed on the CPU, and no failure wastes what was measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch
from support.paths import ROOT

import hour
from device_hour import crowd
from device_hour import session as sessions
from device_hour.costs import Samples
from device_hour.driver import Driver
from device_hour.plan import GROUP_S, GROUPS, HOUR_S, Stage, planned_s
from device_hour.results import Results, State
from device_hour.runner import run_group
from device_hour.session import REHEARSAL_SLOTS, Options, Session
from duplane.tools.bench import stages as parts
from duplane.tools.bench.schedule.costs import read_costs
from duplane.tools.bench.stages import StageCall
from duplane.worker.models.interface import DeviceLostError
from duplane.worker.models.scripted.model import ScriptedModel
from duplane.worker.models.types import Unit, UnitFailure, UnitOutput

SCRIPTS = ROOT / "tools" / "gpu"
FILES_BACK = 8  # as many as a lent machine may return


def records(out: Path, group: str) -> dict[str, dict[str, Any]]:
    return orjson.loads((out / f"hour-{group}.json").read_bytes())


def test_the_plan_fits_an_hour_and_each_group_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(map(planned_s, GROUPS)) <= HOUR_S
    for group, stages in GROUPS.items():
        assert planned_s(group) <= GROUP_S
        assert all(stage.planned_s <= stage.deadline_s < GROUP_S for stage in stages)
    assert hour.main(["--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *(name for group, stages in GROUPS.items() for name in (group, *(s.name for s in stages))),
        "all",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rehearsal_runs_every_stage_and_keeps_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rehearse", "--out", str(tmp_path)]
    code = hour.main(flags)
    assert code == 0, capsys.readouterr().out
    for group, stages in GROUPS.items():
        found = records(tmp_path, group)
        assert [(name, one["state"]) for name, one in found.items()] == [
            (stage.name, State.DONE) for stage in stages
        ]
        assert found["load"]["result"]["slots"] == REHEARSAL_SLOTS
    assert sum(path.is_file() for path in tmp_path.iterdir()) <= FILES_BACK

    costs = orjson.loads((tmp_path / "costs.json").read_bytes())
    assert costs["schema"] == 1
    assert costs["host_ms"] > 0
    assert costs["contention"] > 0
    sizes = {(p["block"], p["bucket"]) for p in costs["points"] if p["ms"] > 0}
    for block in ("hear", "step", "choose", "talk", "voc", "vision"):
        assert {bucket for name, bucket in sizes if name == block} == {1, 2, 3}
    assert read_costs(tmp_path / "costs.json").contention == costs["contention"]
    table = (tmp_path / "latency.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["1", str(REHEARSAL_SLOTS)]

    before = (tmp_path / "hour-costs.json").read_bytes()
    assert hour.main([*flags, "costs"]) == 0
    assert (tmp_path / "hour-costs.json").read_bytes() == before, "a stage ran twice"


def noted(name: str, ran: list[str], error: Exception | None = None) -> Stage:
    """Return a stage that notes that it ran, and raises an error if given."""

    def run(session: Session) -> dict[str, Any]:
        ran.append(name)
        session.keep({"part": 1})
        if error is not None:
            raise error
        return {"all": 2}

    return Stage(name, run, planned_s=1, deadline_s=60)


def test_after_a_failure_the_next_stage_runs_and_a_later_run_leaves_the_failed_one_out(
    tmp_path: Path,
) -> None:
    ran: list[str] = []
    stages = [noted("first", ran, ValueError("no such thing")), noted("second", ran)]
    options = Options(tmp_path, device_name="cpu")
    assert run_group("test", stages, options) == 1
    found = records(tmp_path, "test")
    assert found["first"]["error"] == "ValueError: no such thing"
    assert found["first"]["result"] == {"part": 1}
    assert found["second"]["result"] == {"all": 2}
    assert run_group("test", stages, options) == 1
    assert ran == ["first", "second"]
    run_group("test", stages, Options(tmp_path, device_name="cpu", again=True))
    assert ran == ["first", "second", "first"]


def test_after_the_loss_of_the_device_no_stage_begins(tmp_path: Path) -> None:
    ran: list[str] = []
    stages = [noted("first", ran, DeviceLostError("gone")), noted("second", ran)]
    options = Options(tmp_path, device_name="cpu")
    assert run_group("test", stages, options) == 1
    assert ran == ["first"]
    run_group("test", stages, options)
    assert ran == ["first", "second"], "a new process can use the device again"


def test_a_failed_stage_leaves_no_conversation_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ScriptedModel(slot_count=2)
    driver = Driver(model, model)
    monkeypatch.setattr(Session, "clean_up", lambda _: driver.close())

    def fail(_: Session) -> dict[str, Any]:
        driver.open(1)
        raise ValueError("no such thing")

    options = Options(tmp_path, device_name="cpu")
    run_group("test", [Stage("failing", fail, planned_s=1, deadline_s=60)], options)
    assert model.is_clean(1)


def test_a_stage_without_time_for_its_plan_does_not_begin(tmp_path: Path) -> None:
    ran: list[str] = []
    stages = [noted("long", ran), noted("short", ran)]
    stages[0] = Stage("long", stages[0].run, planned_s=GROUP_S + 1, deadline_s=GROUP_S + 2)
    assert run_group("test", stages, Options(tmp_path, device_name="cpu")) == 1
    assert ran == ["short"]
    assert records(tmp_path, "test")["long"]["state"] == State.NO_TIME


HANGING = """
import sys, threading
from pathlib import Path
from device_hour.plan import Stage
from device_hour.runner import run_group
from device_hour.session import Options

def hang(session):
    session.keep({"part": 1})
    threading.Event().wait()

run_group("test", [Stage("hanging", hang, 0.1, 0.2)], Options(Path(sys.argv[1]), device_name="cpu"))
"""


@pytest.mark.slow
def test_a_stage_that_hangs_ends_the_process_and_the_next_run_goes_past_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGING, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS, check=False)
    assert ended.returncode == 1
    assert "in hang" in ended.stderr, "the traceback shows where"
    ran: list[str] = []
    options = Options(tmp_path, device_name="cpu")
    run_group("test", [noted("hanging", ran), noted("next", ran)], options)
    assert ran == ["next"]
    hanging = records(tmp_path, "test")["hanging"]
    assert hanging["state"] == State.BEGUN
    assert hanging["result"] == {"part": 1}


def test_a_model_that_does_not_fit_is_loaded_with_fewer_slots_and_later_groups_begin_with_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def load_parts(*_: object, slot_count: int, **__: object) -> None:
        asked.append(slot_count)
        if slot_count > 3:
            raise torch.OutOfMemoryError("out of memory")
        raise LookupError("loaded")

    monkeypatch.setattr(sessions, "load_parts", load_parts)
    monkeypatch.setattr(Session, "fitting", lambda _: (0, 6))
    options = Options(tmp_path, checkpoint=tmp_path, device_name="cpu")
    results = Results(tmp_path)
    session = Session(options, results)
    for _ in range(2):
        with pytest.raises(LookupError):
            session.loaded()
    assert asked == [6, 4, 3], "an error that ended the load is raised again without another load"
    results.note("contact", "load", state=State.DONE, result={"slots": 2})
    with pytest.raises(LookupError):
        Session(options, Results(tmp_path)).loaded()
    assert asked[3:] == [2]


def test_costs_are_medians_without_the_first_calls_and_slow_calls_are_listed() -> None:
    samples, stage = Samples(), parts.Stage
    for seconds in (0.9, 0.8, 0.010, 0.012, 0.011):
        calls = [
            StageCall(stage.MEL, "compute", 2, 0.1),
            StageCall(stage.DECODE, "feed", 2, seconds),
            StageCall(stage.DECODE, "choose", 2, 0.003),
            StageCall(stage.FLOW, "encode", 1, 0.02),
            StageCall(stage.HIFT, "decode_mel", 1, 0.03),
        ]
        samples.add(calls, context=512)
    points = [
        (p["block"], p["bucket"], p["context"], p["ms"], p["calls"]) for p in samples.points()
    ]
    assert points == [
        ("choose", 2, 0, pytest.approx(3.0), 3),
        ("step", 2, 512, pytest.approx(11.0), 3),
        ("voc", 1, 0, pytest.approx(50.0), 3),
    ]
    slow = [(one["part"], one["size"], one["call"], one["median_ms"]) for one in samples.outliers()]
    assert slow == [("decode step", 2, call, pytest.approx(12.0)) for call in (0, 1)]


class FadingModel(ScriptedModel):
    """Loses its device after some units."""

    left = 8

    def step(self, units: Sequence[Unit]) -> Iterator[UnitOutput | UnitFailure]:
        """Run units, until the device is lost."""
        self.left -= len(units)
        if self.left < 0:
            raise DeviceLostError("gone")
        return super().step(units)


@pytest.mark.slow
def test_a_crowd_ends_with_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FadingModel(slot_count=4)
    driver = Driver(model, model)
    loaded = SimpleNamespace(driver=driver, served=lambda enter: model)
    monkeypatch.setattr(Session, "loaded", lambda _: loaded)
    options = Options(tmp_path, checkpoint=tmp_path, device_name="cpu", rehearses=True)
    with pytest.raises(DeviceLostError, match="gone"):
        crowd.crowd(Session(options, Results(tmp_path)))
