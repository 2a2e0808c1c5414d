"""The chart of `duplane bench fabric`: its lines have the figures of the rows; it is a PNG file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from support.tools.load_rows import row

from duplane.tools.bench.load.chart import axis_end, cpu_lines, latency_lines, write_chart
from duplane.tools.bench.load.row import Percentiles

ROWS = [row("B", 1, 2.0, 900.0), row("B", 50, 4.0, 700.0), row("grpc", 50, 1.0, None)]


def test_lines_have_a_value_for_each_number_of_sessions() -> None:
    lines = {line.name: line.values for line in latency_lines(ROWS, [1, 50])}
    assert lines["B p50"] == [2.0, 4.0]
    assert lines["B p99"] == [4.0, 8.0]
    assert lines["grpc p50"] == [None, 1.0]
    lines = {line.name: line.values for line in cpu_lines(ROWS, [1, 50])}
    assert lines == {"B edge": [900.0, 700.0], "grpc edge": [None, None]}


@pytest.mark.parametrize(
    ("largest", "end"), [(1.0, 1), (1.3, 2), (4.8, 5), (73, 100), (0.03, 0.05)]
)
def test_axis_ends_at_the_next_round_number(largest: float, end: float) -> None:
    assert axis_end(largest) == pytest.approx(end)


def colours(file: Path) -> set[object]:
    """Return the colours of a chart, without its right margin, which has the names of the lines."""
    with Image.open(file) as image:
        assert image.format == "PNG"
        drawn = image.convert("RGB").crop((0, 0, 740, image.height))
    return {colour for _, colour in drawn.getcolors(1 << 16) or []}


def test_file_is_a_picture_with_lines(tmp_path: Path) -> None:
    blue = (31, 119, 180)  # the colour of the first line
    write_chart(tmp_path / "lines.png", ROWS)
    assert blue in colours(tmp_path / "lines.png")
    without_values = [replace(ROWS[0], added_ms=Percentiles(*[None] * 4), processes={})]
    write_chart(tmp_path / "empty.png", without_values)
    assert blue not in colours(tmp_path / "empty.png")
