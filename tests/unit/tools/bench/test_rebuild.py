"""`duplane bench rebuild`: the content of its table."""

from __future__ import annotations

from support.tools.command import run_command


def test_a_rebuild_is_measured_for_each_number_of_units() -> None:
    code, output = run_command("bench", "rebuild", "--scale", "0.02", "--units", "3,6")
    assert code == 0, output
    rows = [line.split() for line in output.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["3", "6"]
    heads = next(line for line in output.splitlines() if line.startswith("units")).split()
    assert heads[-6:] == ["audio", "prefill", "talker", "vocoder", "shares", "longest"]
    shares = [int(row[-2]) for row in rows]
    assert shares == [1, 3]  # only after 7 units a turn is open, whose speech is computed again
