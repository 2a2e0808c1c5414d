from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.tools.command import run_command

from duplane.tools.golden_replay.check import Check, Verdict, compare, same, skipped, worst
from duplane.tools.golden_replay.run import replay_traces
from duplane.tools.golden_replay.target import ReplayTarget


def good(golden: Path, target: ReplayTarget) -> Iterator[Check]:
    yield compare("embeds", np.zeros(3), np.full(3, 5e-6), 1e-4)


def wrong(golden: Path, target: ReplayTarget) -> Iterator[Check]:
    yield same("lengths", 1, 2)


def by_design(golden: Path, target: ReplayTarget) -> Iterator[Check]:
    yield Check("quirk", 1.0, 0.0, Verdict.DIFFERS, "because")


def later(golden: Path, target: ReplayTarget) -> Iterator[Check]:
    yield skipped("session", "needs frames")


def nothing(golden: Path, target: ReplayTarget) -> Iterator[Check]:
    yield from ()


def broken(golden: Path, target: ReplayTarget) -> Iterator[Check]:
    yield from good(golden, target)
    raise FileNotFoundError("checkpoint/config.json")


def test_agreement_and_deliberate_differences_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_traces(tmp_path, {"a": good, "b": by_design, "c": nothing}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["embeds", "5.00e-06", "1.0e-04", "ok"]
    assert lines[2].split()[3:] == ["differs", "by", "design", "because"]
    assert lines[3] == "2 checks: 1 ok, 0 FAIL, 1 differs by design, 0 not float32, 0 not replayed"


def test_one_failure_fails_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_traces(tmp_path, {"a": wrong, "b": good}) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_part_that_breaks_off_fails_and_the_others_still_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_traces(tmp_path, {"a": broken, "b": good}) == 1
    out = capsys.readouterr().out
    assert "broke off: FileNotFoundError: checkpoint/config.json" in out
    assert "3 checks: 2 ok, 1 FAIL" in out


def test_nothing_to_check_is_a_failure(tmp_path: Path) -> None:
    assert replay_traces(tmp_path, {"a": nothing}) == 1


def test_what_was_not_replayed_is_said_and_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_traces(tmp_path, {"a": good, "b": later}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[3:] == ["not", "replayed", "needs", "frames"]
    assert lines[3] == "1 checks: 1 ok, 0 FAIL, 0 differs by design, 0 not float32, 1 not replayed"
    assert replay_traces(tmp_path, {"b": later}) == 1


@pytest.mark.parametrize(
    ("part", "values", "code"),
    [
        ("duplex", [1.0, 2.0, 3.02], 0),
        ("duplex", [1.05, 2.1, 3.15], 1),
        ("duplex", [1.0, 2.0, float("nan")], 1),
        ("duplex", [1.0, 2.0], 1),
        ("chat", [1.05, 2.1, 3.15], 0),
    ],
)
def test_another_dtype_has_a_bound_of_its_own(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    part: str,
    values: Sequence[float],
    code: int,
) -> None:
    def checked(golden: Path, target: ReplayTarget) -> Iterator[Check]:
        found = [compare("logits", values, [1.0, 2.0, 3.0], 1e-4), compare("hidden", 0, 0, 1e-4)]
        yield worst("combined", found)

    target = ReplayTarget(dtype_name="bfloat16")
    assert replay_traces(tmp_path, {part: checked}, target) == code
    assert ("1 FAIL" if code else "1 not float32") in capsys.readouterr().out
    assert replay_traces(tmp_path, {"duplex": wrong, "b": good}, target) == 1
    assert replay_traces(tmp_path, {"chat": broken}, target) == 1


def test_a_device_that_is_absent_is_refused_in_one_line(tmp_path: Path) -> None:
    code, output = run_command("checkpoint", "replay", str(tmp_path), "--device", "cuda:99")
    assert code == 2
    assert output.startswith("duplane: device cuda:99 is not there")
