"""The scripts of tools/gpu run to their end with a tiny model on the CPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.paths import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "tools" / "gpu"
TABLES = {
    "sanity": {"peaks", "settings of torch", "attention of one layer, ms"},
    "batches": {"units, ms; contexts of 50 to 200 rows"},
    "bitwise": {"units equal to those of the same conversation alone in slot 0"},
    "soak": {"2 sessions of one unit per second; ms from unit to answer"},
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def run(name: str, out: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Run a script; return its exit code and its output."""
    code = importlib.import_module(name).main(["--small", "--out", str(out), *flags])
    return code, orjson.loads((out / f"gpu-{name}.json").read_bytes())


@pytest.mark.parametrize("name", TABLES)
def test_a_script_fills_its_tables(name: str, tmp_path: Path) -> None:
    minutes = "0.1" if name == "soak" else "10"
    code, report = run(name, tmp_path, "--minutes", minutes)
    assert report["failures"] == []
    assert code == 0
    tables = {table["title"]: table for table in report["tables"]}
    assert set(tables) >= TABLES[name]
    for title in TABLES[name]:
        assert tables[title]["rows"]
        columns = len(tables[title]["columns"])
        assert all(len(row) == columns for row in tables[title]["rows"])


def test_a_script_begins_nothing_when_its_minutes_are_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run("batches", tmp_path, "--minutes", "0")
    assert code == 0
    assert report["tables"][0]["rows"] == []
    assert "no time left for: 1 graphs, 100% listening" in capsys.readouterr().out


def test_a_failing_case_is_kept_and_the_next_one_runs(tmp_path: Path) -> None:
    measure = importlib.import_module("measure")
    report = measure.Report("failing", measure.read_options(["--small", "--out", str(tmp_path)]))
    with report.case("the first"):
        raise ValueError("no such thing")
    with report.case("the second"):
        report.table("a table", ("", "ms")).add("a row", 1.5)
    written = orjson.loads((tmp_path / "gpu-failing.json").read_bytes())
    assert written["failures"] == [{"case": "the first", "error": "ValueError('no such thing')"}]
    assert written["tables"][0]["rows"] == [["a row", 1.5]]
    assert report.exit_code == 1
