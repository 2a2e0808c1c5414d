"""A command begins fast, because it imports only what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = {
    *("torch", "transformers", "numpy", "av", "PIL"),
    *("grpc", "aiohttp", "websockets", "cryptography", "opentelemetry.sdk", "prometheus_client"),
}


def imported(statement: str) -> set[str]:
    """Return the slow packages that a statement imports in a new process."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return SLOW & {*ran.stdout.split()}


def test_help_of_the_command_imports_no_slow_package() -> None:
    assert imported("from duplane.tools.main import app") == set()


@pytest.mark.parametrize("module", ["duplane.fabric.client", "duplane.fabric.converse"])
def test_client_of_the_fabric_imports_grpc_and_nothing_else_that_is_slow(module: str) -> None:
    assert imported(f"import {module}") == {"grpc"}
