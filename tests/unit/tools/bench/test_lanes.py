"""`duplane bench lanes`: the content of its table."""

from __future__ import annotations

import pytest
from support.tools.command import run_command


@pytest.mark.slow
def test_speech_in_one_lane_and_in_two_is_measured_in_turn() -> None:
    flags = ["--scale", "0.02", "--slots", "2", "--units", "2", "--runs", "2"]
    code, output = run_command("bench", "lanes", *flags)
    assert code == 0, output
    table = output[output.index("2 conversations speak, units per second") :]
    rows = [line.split() for line in table.splitlines()[4:] if line]
    assert [row[0] for row in rows] == ["1", "2", "median"]
    for row in rows[:2]:
        one, two, ratio = map(float, row[1:])
        assert one > 0
        assert ratio == pytest.approx(two / one, abs=0.02)
