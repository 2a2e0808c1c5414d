"""Rules for the sources that neither ruff nor pyright checks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

# A file above the first number is worth a look: is it still one idea? Above the second it fails.
MANY_LINES = 400
MAX_LINES = 600
FOLDERS = ("clients", "edge", "proto", "scheduler", "tests", "tools", "worker")
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


@pytest.mark.filterwarnings("always:files above")
def test_no_file_is_too_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()
    }
    if long := {path: length for path, length in lengths.items() if length > MANY_LINES}:
        warnings.warn(f"files above {MANY_LINES} lines: {long}", stacklevel=1)
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}


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
