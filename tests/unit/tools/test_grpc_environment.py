"""The command sets the environment of gRPC before gRPC is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys

class Check:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            sys.stdout.write(os.environ.get("GRPC_EXPERIMENTS", "not set"))
            sys.exit()

sys.meta_path.insert(0, Check())
import duplane.tools.main
"""


@pytest.mark.parametrize(
    ("given", "expected"), [(None, "-event_engine_client"), ("tcp_rcv_lowat", "tcp_rcv_lowat")]
)
def test_grpc_is_imported_with_one_reading_thread(given: str | None, expected: str) -> None:
    environment = {**os.environ}
    environment.pop("GRPC_EXPERIMENTS", None)
    if given:
        environment["GRPC_EXPERIMENTS"] = given
    run = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == expected, run.stderr
