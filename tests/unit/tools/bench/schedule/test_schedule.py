"""`duplane bench schedule`: its table, its costs, and the numbers that the schedule must reach."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.tools.command import run_command

from duplane.tools.bench.report import percentile
from duplane.tools.bench.schedule.costs import (
    BUILT_IN,
    TF32_VOCODER_MS,
    Computed,
    CostsError,
    Size,
    launch_ms,
    read_costs,
)
from duplane.tools.bench.schedule.prediction import predict
from duplane.tools.bench.schedule.run import simulate
from duplane.tools.bench.schedule.simulation import is_ordinary
from duplane.tools.bench.schedule.traffic import MEAN_IDS, Traffic, mixed
from duplane.worker.engine.schedule import Block

H200, H100 = BUILT_IN["h200"], BUILT_IN["h100"]
TF32 = replace(H200, vocoder_ms=TF32_VOCODER_MS)
SHORT = ("bench", "schedule", "--seeds", "1", "--seconds", "6")


def point(block: str, bucket: int, ms: float, context: int = 0) -> dict[str, Any]:
    return {"block": block, "bucket": bucket, "context": context, "ms": ms, "calls": 3}


POINTS = [
    point("hear", 1, 2.0),
    point("hear", 8, 9.0),
    point("vision", 1, 5.0),
    point("choose", 1, 0.5),
    point("pass", 15, 6.0, 500),
    point("pass", 120, 27.0, 500),
    point("pass", 15, 8.0, 8000),
    point("pass", 120, 36.0, 8000),
    point("step", 1, 4.0, 500),
    point("talk", 1, 20.0),
    point("voc", 1, 9.0),
]


def costs_file(folder: Path, **changes: Any) -> Path:
    content = {
        "schema": 1,
        "device": "Test GPU",
        "dtype": "bfloat16",
        "host_ms": 0.1,
        "busy_host_ms": 0.2,
        "contention": 1.4,
        "points": POINTS,
    }
    path = folder / "costs.json"
    path.write_bytes(orjson.dumps(content | changes))
    return path


def test_table_says_first_that_it_is_simulated() -> None:
    code, output = run_command(*SHORT, "--sessions", "2", "--mixed")
    lines = output.splitlines()
    assert code == 0
    assert "SIMULATED" in lines[0]
    assert "nothing was measured on a GPU" in lines[0]
    assert lines[-1].endswith("0 units later than 1 s")


def test_late_units_fail_the_command() -> None:
    code, output = run_command(*SHORT, "--sessions", "24", "--host-ms", "60")
    assert code == 1
    assert " 0 units later" not in output


def test_costs_come_from_a_file(tmp_path: Path) -> None:
    code, output = run_command(*SHORT, "--sessions", "2", "--costs", str(costs_file(tmp_path)))
    assert code == 0
    assert "Test GPU" in output


def test_times_of_a_file_are_linear_between_its_sizes(tmp_path: Path) -> None:
    costs = read_costs(costs_file(tmp_path))
    assert launch_ms(costs, Size(Block.HEAR, 2)) == pytest.approx(3.0 + 0.1)
    assert launch_ms(costs, Size(Block.HEAR, 16)) == pytest.approx(18.0 + 0.1)
    assert launch_ms(costs, Size(Block.VOCODE, 1)) == pytest.approx(9.0 + 2 * 0.1)
    filled = Size(Block.PASS, 15, contexts=(4250,), fills=True)
    assert launch_ms(costs, filled) == pytest.approx(7.0 + 0.5 + 0.1)
    step = Size(Block.PASS, 1, contexts=(500,))
    assert launch_ms(costs, step) == pytest.approx(4.0 + 0.5 + 0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema is 2"),
        ({"points": [one for one in POINTS if one["block"] != "talk"]}, "talk"),
        ({"contention": None}, "contention"),
    ],
)
def test_file_without_what_is_needed_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CostsError, match=message):
        read_costs(costs_file(tmp_path, **changes))


def test_file_that_is_no_file_of_costs_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("[1]")
    code, output = run_command(*SHORT, "--costs", str(path))
    assert code == 2
    assert "not a file of costs" in output


def p99_ms(costs: Computed, traffic: Traffic, *, seeds: int = 3) -> float:
    """Return the median of the p99 of ordinary units; no unit may be late."""
    outcomes = [simulate(costs, traffic, lanes=2, seed=seed) for seed in range(1, seeds + 1)]
    assert not any(outcome.late for outcome in outcomes)
    latencies = [outcome.latencies(is_ordinary) for outcome in outcomes]
    return 1e3 * statistics.median(percentile(one, 0.99) for one in latencies)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("costs", "traffic", "most_ms"),
    [
        (H200, Traffic(64), 250),
        (H200, mixed(64, 0.5, 40.0), 320),
        (TF32, mixed(64, 0.5, 40.0), 290),
        (H100, Traffic(30), 250),
        (H100, mixed(30, 0.5, 40.0), 320),
    ],
)
def test_schedule_reaches_its_numbers(costs: Computed, traffic: Traffic, most_ms: float) -> None:
    assert p99_ms(costs, traffic) <= most_ms


@pytest.mark.slow
def test_no_unit_is_late_with_a_slow_host() -> None:
    assert p99_ms(replace(H200, host_ms=2.0), mixed(64, 0.5, 40.0), seeds=1) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("costs", [H200, TF32, H100])
@pytest.mark.parametrize("sessions", [16, 40, 64])
def test_prediction_is_near_the_simulation(costs: Computed, sessions: int) -> None:
    outcome = simulate(costs, Traffic(sessions), lanes=2, seed=1)
    speaking = percentile(outcome.latencies(lambda task: task.speaks), 0.99)
    assert 0.6 < predict(costs, sessions, 0.5, MEAN_IDS).p99_ms / (1e3 * speaking) < 1.2


@pytest.mark.slow
def test_computed_times_have_the_sizes_of_the_launches_of_the_model() -> None:
    from duplane.worker.models.minicpm_o.audio.encoder import LAUNCH_UNITS
    from duplane.worker.models.minicpm_o.llm.language_model import PASS_ROWS
    from duplane.worker.models.minicpm_o.tts.block import WIDTHS

    assert H200.hear_sizes == LAUNCH_UNITS
    assert H200.pass_sizes == PASS_ROWS
    assert H200.talk_sizes == WIDTHS
