"""A plugin of pytest that runs a test marked `timing` once more if it fails, and counts this.

A run fails if a test needed a second attempt for the second time in ten runs of this test. Two
places say which tests needed one before:

- pytest's cache (`.pytest_cache`), which the plugin writes. A fresh clone has none.
- the list `tests/reruns.toml`, which is committed, so that each clone has it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable

import pytest
from support.paths import TESTS

WINDOW_RUNS = 10
LIST = TESTS / "reruns.toml"
HISTORY = "duplane/runs_since_rerun"


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def updated(
    history: dict[str, int], attempted: Iterable[str], rerun: Iterable[str]
) -> dict[str, int]:
    """Return the history after a run in which the tests `attempted` ran, some of them `rerun`.

    The history has the number of runs of each test since it needed a rerun, if less than ten.
    """
    ran = set(attempted)
    after = {name: runs + (name in ran) for name, runs in history.items()}
    after |= dict.fromkeys(rerun, 0)
    return {name: runs for name, runs in after.items() if runs < WINDOW_RUNS}


class Reruns:
    """The attempts of one run, which its workers report to the main process."""

    def __init__(self) -> None:
        self.attempted: set[str] = set()
        self.failures: dict[str, str] = {}
        """The first failure of each test that needed a rerun."""
        self.too_often: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.attempted.add(report.nodeid)
        if str(report.outcome) == "rerun":  # set by pytest-rerunfailures
            self.failures[report.nodeid] = report.longreprtext

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cache: pytest.Cache | None = getattr(session.config, "cache", None)  # may be switched off
        history: dict[str, int] = cache.get(HISTORY, {}) if cache else {}
        before = {*history, *tomllib.loads(LIST.read_text())}
        self.too_often = sorted(before & set(self.failures))
        if cache:
            cache.set(HISTORY, updated(history, self.attempted, self.failures))
        if self.too_often and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, failure in self.failures.items():
            terminalreporter.section(f"first attempt of {name}")
            terminalreporter.write_line(failure)
        if self.too_often:
            terminalreporter.section(f"second rerun in {WINDOW_RUNS} runs", red=True)
            for name in self.too_often:
                terminalreporter.write_line(name)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that gets the reports of all workers
        config.pluginmanager.register(Reruns())
