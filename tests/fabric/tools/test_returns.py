"""`duplane bench fabric` with resumable calls, on real processes."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.tools.command import run_command

pytestmark = [pytest.mark.slow, pytest.mark.timing]


def test_no_call_and_no_unit_is_lost_with_its_socket(tmp_path: Path) -> None:
    file = tmp_path / "returns.json"
    flags = ("--sessions", "8", "--seconds", "14", "--warm-up-s", "1", "--return-s", "0.25:1")
    code, output = run_command(
        *("bench", "fabric", *flags, "--drop-sockets-every-s", "6", "--json", str(file))
    )
    assert code == 0, output
    (row,) = orjson.loads(file.read_bytes())["returns"]
    assert row["disturbances"]["reset"] > 2
    assert row["disturbances"]["silent"] > 2
    assert row["problems"] == [], output
