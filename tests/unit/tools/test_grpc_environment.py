"""The command sets the environment of gRPC before gRPC is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import orjson
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


def test_grpc_writes_no_lines_of_its_own() -> None:
    """Its lines would be neither JSON nor text with a time and a role."""
    command = ("-m", "duplane.tools", "scheduler", "--listen", "192.0.2.1:1")
    ran = subprocess.run(
        [sys.executable, *command, "--log-format", "json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (line,) = (orjson.loads(line) for line in ran.stderr.splitlines())
    assert line["message"].startswith("cannot listen on 192.0.2.1:1")
    assert (ran.returncode, ran.stdout) == (1, "")
