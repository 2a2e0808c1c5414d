"""`duplane plan`: sizes follow from figures that the page has, and GPUs need a measurement."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.paths import ROOT
from support.tools.command import run_command

from duplane.tools.plan import figures
from duplane.tools.plan.device_file import parse_device
from duplane.tools.plan.sizing import Load, Size, device_sizes, fabric_sizes

DEVICE: dict[str, Any] = {
    "name": "gpu",
    "source": "a test",
    "measured": [{"speaking": 1.0, "slots": 8}, {"speaking": 0.5, "slots": 16}],
}
FILE = """
name = "gpu"
source = "a test"
measured = [{speaking = 0.5, slots = 16}]
"""


def value(sizes: list[Size], what: str) -> float:
    return next(size.value for size in sizes if size.what == what)


@pytest.mark.parametrize("figure", figures.MEASURED, ids=lambda figure: figure.text)
def test_measured_figure_is_in_its_section_of_the_page(figure: figures.Measured) -> None:
    page = (ROOT / figures.FIGURES_PAGE).read_text()
    sections = re.split(r"^## ", page, flags=re.M)
    (section,) = [one for one in sections if one.startswith(f"{figure.section}:")]
    assert figure.text in section
    assert f"{figure.value:g}" in figure.text


@pytest.mark.parametrize(("speaking", "slots"), [(0.0, 16), (0.5, 16), (0.51, 8), (1.0, 8)])
def test_devices_are_sized_for_the_share_that_speaks(speaking: float, slots: int) -> None:
    sizes = list(device_sizes(Load(33, speaking, 10), parse_device(DEVICE)))
    assert value(sizes, "slots of a worker (--slots)") == slots
    assert value(sizes, "GPUs (gpu), a worker each") == -(-33 // slots) + 1


@pytest.mark.parametrize(("sessions", "edges"), [(1, 2), (287, 2), (288, 3), (1000, 5)])
def test_one_edge_more_than_the_load_needs(sessions: int, edges: int) -> None:
    sizes = list(fabric_sizes(Load(sessions, 0.5, 10)))
    assert value(sizes, "edges, one core each") == edges
    assert value(sizes, "schedulers") == value(sizes, "members of etcd") == 3
    assert all(size.source.startswith(("measured", "modelled", "design")) for size in sizes)


def test_longer_sessions_need_more_memory_up_to_the_bound_of_a_journal() -> None:
    memory = [
        value(list(fabric_sizes(Load(100, 0.5, minutes))), "memory of an edge")
        for minutes in (1, 10, 18, 60)
    ]
    assert memory[0] < memory[1] < memory[2] == memory[3]


def test_more_grants_than_were_measured_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^sessions: 200 sessions would begin in a second"):
        list(fabric_sizes(Load(12_000, 0.5, 1)))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"name": ""}, "name"),
        ({"source": 1}, "source"),
        ({"measured": []}, "measured"),
        ({"more": 1}, "more"),
        ({"measured": [{"speaking": 2, "slots": 1}]}, r"measured\[0\]\.speaking"),
        ({"measured": [{"speaking": True, "slots": 1}]}, r"measured\[0\]\.speaking"),
        ({"measured": [{"speaking": float("nan"), "slots": 1}]}, r"measured\[0\]\.speaking"),
        ({"measured": [{"speaking": 1, "slots": 0}]}, r"measured\[0\]\.slots"),
        ({"measured": [{"speaking": 1, "slots": 1, "x": 1}]}, r"measured\[0\]\.x"),
        ({"measured": [1]}, r"measured\[0\]"),
    ],
)
def test_file_of_a_device_is_refused_by_field(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        parse_device({**DEVICE, **changed})


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_devices_without_figures_are_refused_and_the_rest_is_sized(device: str) -> None:
    asked = ("plan", "--sessions", "100", "--speaking", "0.5", "--device", device)
    code, text = run_command(*asked)
    assert code == 1
    assert "edges, one core each" in text
    assert f"--device {device}: the GPUs are not sized" in text
    assert "GPUs (" not in text


def test_plan_with_a_file_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "gpu.toml"
    file.write_text(FILE)
    asked = ("plan", "--sessions", "100", "--device", str(file), "--json", "--speaking")
    code, text = run_command(*asked, "0.25")
    told = orjson.loads(text)
    assert (code, told["refused"]) == (0, "")
    assert {"what", "value", "unit", "source"} == set(told["sizes"][0])
    code, text = run_command(*asked, "0.75")
    assert code == 2
    assert "--speaking: gpu was measured only up to 0.5" in text


@pytest.mark.parametrize(("content", "message"), [(b"name = 1", "name: must"), (b"\xff", "utf-8")])
def test_unusable_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "gpu.toml"
    file.write_bytes(content)
    code, text = run_command("plan", "--sessions", "1", "--speaking", "0", "--device", str(file))
    assert code == 2
    assert f"--device {file}" in text
    assert message in text


@pytest.mark.parametrize("wrong", [("--sessions", "0"), ("--session-minutes", "nan")])
def test_numbers_out_of_their_bounds_are_refused_by_name(wrong: tuple[str, str]) -> None:
    given = {"--sessions": "10", "--speaking": "0.5", "--device": "h200"} | dict([wrong])
    code, output = run_command("plan", *(word for pair in given.items() for word in pair))
    assert code == 2
    assert output.startswith(f"duplane: {wrong[0]} is ")
    assert output.endswith(", must be above 0\n")
