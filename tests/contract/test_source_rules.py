"""Rules for the sources that neither ruff nor pyright checks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

MAX_LINES = 400
MAX_MODULES = 15
FOLDERS = ("edge", "proto", "scheduler", "tests", "tools", "worker")
SUPPRESSION = re.compile(
    r"# (?:noqa(?:: [A-Z0-9, ]+)?|fmt: (?:skip|off)|(?:pyright|type): ignore(?:\[[\w, -]+\])?)"
)
FILE_DIRECTIVE = re.compile(r"# (?:ruff: noqa|pyright: (?!ignore))")


def sources() -> Iterator[Path]:
    """Yield all modules of sources and tests, except generated modules."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield path


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources()}
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}


def test_no_folder_has_too_many_modules() -> None:
    counts = Counter(path.parent for path in sources())
    assert not {path: count for path, count in counts.items() if count > MAX_MODULES}


def is_reason(text: str) -> bool:
    return re.search(r"[a-z]{3}", text) is not None


def test_each_suppression_has_a_reason_on_its_line() -> None:
    """A second suppression on the line is no reason for the first."""
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if (found := SUPPRESSION.search(line))
        and not is_reason(SUPPRESSION.sub("", line[found.start() :]))
    ]
    assert not bare


def test_no_module_suppresses_a_rule_in_all_its_lines() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if FILE_DIRECTIVE.match(line)
    ]
    assert not found
