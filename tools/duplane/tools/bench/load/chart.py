"""Draws a chart of the rows: latency percentiles and CPU time against the number of sessions.

The chart is drawn with Pillow, which the worker needs anyway. Matplotlib would install nine more
packages for two panels of lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from duplane.tools.bench.load.row import Row

_WIDTH, _HEIGHT = 900, 360  # size of one panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 150, 40, 50  # margins
_COLOURS = ("#1f77b4", "#ff7f0e", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
_INK, _GRID = "#222222", "#dddddd"
_STEPS = 5  # steps of the vertical axis


@dataclass(frozen=True)
class ChartLine:
    """One line of a panel: a value for each number of sessions, or None if it was not measured."""

    name: str
    values: Sequence[float | None]


def write_chart(file: Path, rows: Sequence[Row]) -> None:
    """Write a PNG with two panels.

    Of several rows with the same dialect and number of sessions, only the last row is drawn.
    """
    sessions = sorted({row.sessions for row in rows})
    panels = (
        ("added ms", latency_lines(rows, sessions)),
        ("CPU us per unit", cpu_lines(rows, sessions)),
    )
    image = Image.new("RGB", (_WIDTH, _HEIGHT * len(panels)), "white")
    draw = ImageDraw.Draw(image)
    for index, (title, lines) in enumerate(panels):
        _draw_panel(draw, index * _HEIGHT, title, sessions, lines)
    image.save(file, format="PNG")


def latency_lines(rows: Sequence[Row], sessions: Sequence[int]) -> Sequence[ChartLine]:
    """Return the lines of p50, p95 and p99 for each dialect."""
    dialects = dict.fromkeys(row.dialect for row in rows)
    figures: dict[str, Callable[[Row], float | None]] = {
        "p50": lambda row: row.added_ms.p50,
        "p95": lambda row: row.added_ms.p95,
        "p99": lambda row: row.added_ms.p99,
    }
    return [
        _line(f"{dialect} {name}", rows, dialect, sessions, figure)
        for dialect in dialects
        for name, figure in figures.items()
    ]


def cpu_lines(rows: Sequence[Row], sessions: Sequence[int]) -> Sequence[ChartLine]:
    """Return a line of CPU time for each dialect and process."""
    names = dict.fromkeys((row.dialect, name) for row in rows for name in row.processes)

    def cost_of(name: str) -> Callable[[Row], float | None]:
        return lambda row: row.processes[name].cpu_us_per_unit if name in row.processes else None

    return [
        _line(f"{dialect} {name}", rows, dialect, sessions, cost_of(name))
        for dialect, name in names
    ]


def axis_end(largest: float) -> float:
    """Return the value at which an axis of five steps ends.

    This is the first number of the series ... 0.5, 1, 2, 5, 10 ... that is not below `largest`.
    """
    size = 10.0 ** math.floor(math.log10(largest))
    return size * next(factor for factor in (1, 2, 5, 10) if factor * size >= largest)


def _line(
    name: str,
    rows: Sequence[Row],
    dialect: str,
    sessions: Sequence[int],
    figure: Callable[[Row], float | None],
) -> ChartLine:
    values = {row.sessions: figure(row) for row in rows if row.dialect == dialect}
    return ChartLine(name, [values.get(number) for number in sessions])


def _draw_panel(
    draw: ImageDraw.ImageDraw,
    top: int,
    title: str,
    sessions: Sequence[int],
    lines: Sequence[ChartLine],
) -> None:
    font = ImageFont.load_default(14)
    bottom, right = top + _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    largest = axis_end(max((value for line in lines for value in line.values if value), default=1))

    def at(index: int, value: float) -> tuple[float, float]:
        across = (index + 0.5) / len(sessions) * (right - _LEFT)
        return _LEFT + across, bottom - value / largest * (bottom - top - _TOP)

    draw.text((_LEFT, top + 12), title, _INK, font)
    for step in range(_STEPS + 1):
        value = largest * step / _STEPS
        _, y = at(0, value)
        draw.line([(_LEFT, y), (right, y)], _GRID)
        draw.text((_LEFT - 8, y), f"{value:g}", _INK, font, anchor="rm")
    for index, number in enumerate(sessions):
        draw.text((at(index, 0)[0], bottom + 8), str(number), _INK, font, anchor="mt")
    draw.text(((_LEFT + right) / 2, bottom + 28), "sessions", _INK, font, anchor="mt")
    for order, line in enumerate(lines):
        colour = _COLOURS[order % len(_COLOURS)]
        points = [at(index, value) for index, value in enumerate(line.values) if value is not None]
        draw.line(points, colour, 2)
        for x, y in points:
            draw.ellipse([(x - 3, y - 3), (x + 3, y + 3)], colour)
        draw.text((right + 12, top + _TOP + 20 * order), line.name, colour, font)
