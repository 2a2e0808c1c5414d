"""Triton kernels, interpreted and compiled without a GPU, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux"),
]


def run(module: str, **environment: str) -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider")
    done = subprocess.run(
        [*command, str(HERE / module)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_interpreted_kernels_compute_what_torch_computes() -> None:
    run("interpreted.py", TRITON_INTERPRET="1")


def test_kernels_compile_for_devices_that_are_not_here(tmp_path: Path) -> None:
    run("compiled.py", TRITON_CACHE_DIR=str(tmp_path))
