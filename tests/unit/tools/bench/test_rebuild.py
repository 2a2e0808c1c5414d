"""`duplane bench rebuild`: the content of its table."""

from __future__ import annotations

import pytest
from support.tools.command import run_command

from duplane.worker.checkpoints import DEFAULT_CHECKPOINT


def test_a_rebuild_is_measured_for_each_number_of_units() -> None:
    code, output = run_command("bench", "rebuild", "--scale", "0.02", "--units", "3,6")
    assert code == 0, output
    rows = [line.split() for line in output.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["3", "6"]
    heads = next(line for line in output.splitlines() if line.startswith("units")).split()
    assert heads[-6:] == ["audio", "prefill", "talker", "vocoder", "shares", "longest"]
    shares = [int(row[-2]) for row in rows]
    assert shares == [1, 3]  # only after 7 units a turn is open, whose speech is computed again


@pytest.mark.slow
def test_rebuild_from_what_is_kept_is_compared_with_one_from_all_units() -> None:
    flags = ("--window", "context", "--window-units", "2", "--windows", "3", "--units", "9")
    code, output = run_command("bench", "rebuild", "--checkpoint", str(DEFAULT_CHECKPOINT), *flags)
    assert code == 0, output
    (row,) = (line.split() for line in output.splitlines() if line[:1].isdigit())
    heads = next(line for line in output.splitlines() if line.startswith("units")).split()
    assert heads[-3:] == ["ids", "speech", "samples"]
    units, _, fed, heard = map(int, row[:4])
    assert (
        units == fed + heard == 9
    )  # four layers need three contexts more; the audio encoder hears its first period whole
    assert float(row[-4]) < 1e-5
