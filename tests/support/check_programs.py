"""Programs that check images and workflows; `make .checks/.installed` installs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

_BIN = ROOT / ".checks/bin"


def run_check(name: str, *arguments: str | Path) -> str:
    """Run a program, which must succeed, at the root; skip the test if it is not installed."""
    program = shutil.which(name, path=str(_BIN)) or shutil.which(name)
    if program is None:
        pytest.skip(f"no {name}: run make checks")
    done = subprocess.run(
        [program, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
