"""A test that needs a rerun twice in ten runs fails the run; the files of a run are timed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT, TESTS
from support.reruns import HISTORY, LIST, WINDOW_RUNS, updated

pytest_plugins = ["pytester"]

FAILS_FIRST = """
import pathlib
import pytest

@pytest.mark.timing
def test_late():
    first = not pathlib.Path("attempted").exists()
    pathlib.Path("attempted").touch()
    assert not first, "it came too late"

def test_other():
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a project with one test that passes at its second attempt, once."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    pytester.makepyfile(test_late=FAILS_FIRST)
    pytester.makeini("[pytest]\nmarkers = timing\nasyncio_default_fixture_loop_scope = session")
    return pytester


def run(project: pytest.Pytester) -> pytest.RunResult:
    plugins = ("-p", "support.reruns", "-p", "support.slow_files")
    return project.runpytest_inprocess(*plugins, "-n", "1", "--slowest-files", "1")


@pytest.mark.slow
def test_second_rerun_fails_the_run(project: pytest.Pytester) -> None:
    first = run(project)
    assert first.ret == 0
    first.stdout.fnmatch_lines(["*first attempt of test_late.py::test_late*", "*came too late*"])
    first.stdout.fnmatch_lines(["*slowest 1 files*", "* s  test_late.py"])
    (project.path / "attempted").unlink()
    second = run(project)
    assert second.ret == 1
    second.stdout.fnmatch_lines(["*second rerun in 10 runs*", "test_late.py::test_late"])


def test_history_counts_the_runs_of_each_test() -> None:
    history = updated({}, ["a", "b"], ["a"])
    assert history == {"a": 0}
    history = updated(history, ["b"], [])
    assert history == {"a": 0}, "a did not run"
    for _ in range(WINDOW_RUNS - 1):
        history = updated(history, ["a"], [])
    assert history == {"a": WINDOW_RUNS - 1}
    assert updated(history, ["a"], []) == {}
    assert updated(history, ["a"], ["a"]) == {"a": 0}


def test_listed_reruns_name_tests_that_exist_and_their_cause() -> None:
    for name, entry in tomllib.loads(LIST.read_text()).items():
        file, _, case = name.partition("::")
        assert f"def {case.partition('[')[0]}(" in (ROOT / file).read_text(), name
        assert set(entry) == {"date", "cause"}, name
        assert entry["cause"], name


def test_ci_keeps_the_history() -> None:
    workflow = (ROOT / ".github/workflows/check.yml").read_text()
    folder = Path(".pytest_cache/v") / Path(HISTORY).parent
    assert workflow.count(f"path: {folder}\n") == 2, "restored before the tests, saved after them"
