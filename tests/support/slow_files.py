"""A plugin of pytest that shows the files whose tests took the longest time."""

from __future__ import annotations

from collections import defaultdict

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slowest-files", type=int, default=0, metavar="N", help="show the N slowest test files"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    count = int(terminalreporter.config.getoption("slowest_files") or 0)
    if not count:
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                # With setup and teardown, which include the fixtures that a file shares.
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest {count} files, of {sum(seconds.values()):.0f} s")
    for file in sorted(seconds, key=seconds.__getitem__, reverse=True)[:count]:
        terminalreporter.write_line(f"{seconds[file]:7.1f} s  {file}")
