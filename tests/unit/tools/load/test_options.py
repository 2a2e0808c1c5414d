"""Flags of `duplane bench fabric`: invalid values are refused before any process starts."""

from __future__ import annotations

import pytest
from support.tools.command import run_command

from duplane.tools.bench.options import FabricBench


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dialect", "D"], "dialect is 'D', must be one of A, B, C, E, L, grpc"),
        (["--url", "http://h:1"], "url is 'http://h:1', must begin with ws://"),
        (["--url", "ws://h:1", "--dialect", "A,grpc"], "'grpc', which url 'ws://h:1' does not"),
        (["--url", "grpc://h:1", "--dialect", "B"], "'B', which url 'grpc://h:1' does not"),
        (["--url", "ws://h:1", "--edge-cpu", "0"], "edge_cpu, telemetry and tls cannot be used"),
        (["--kill-every-s", "10"], "kill_every_s: needs a fabric of the command with at least 2"),
        (
            ["--workers", "2", "--kill-every-s", "10", "--restart-every-s", "10"],
            "kill_every_s and restart_every_s cannot be used together",
        ),
        (
            ["--workers", "2", "--restart-every-s", "10"],
            "seconds is 10, must not be below 20, twice restart_every_s",
        ),
        (
            ["--workers", "2", "--kill-every-s", "4.5", "--seconds", "8.9"],
            "seconds is 8.9, must not be below 9, twice kill_every_s",
        ),
        (["--return-s", "4:1"], "return_s is '4:1', must be LOW:HIGH in seconds"),
        (["--return-s", "x"], "return_s is 'x', must be LOW:HIGH"),
        (
            ["--drop-sockets-every-s", "10", "--url", "ws://h:1"],
            "drop_sockets_every_s: needs a fabric of the command, and dialect B",
        ),
        (
            ["--kill-edge-every-s", "10", "--dialect", "A"],
            "kill_edge_every_s: needs a fabric of the command, and dialect B",
        ),
        (
            ["--restart-edges-every-s", "10", "--tls"],
            "restart_edges_every_s: cannot be used with kill_every_s, restart_every_s,",
        ),
        (["--dialect", "B,C", "--resumable"], "resumable: needs dialect A or B"),
        (["--url", "ws://h:1", "--operator-pages", "1"], "operator_pages: needs a fabric of the"),
        (["--operator-pages", "9"], "operator_pages is 9, must not be above 8"),
        (["--process", "edge=1"], "process: needs url"),
        (["--url", "ws://h:1", "--process", "edge=x"], "process: must be NAME=ID"),
        (["--sessions", "0"], "must be numbers like 1,2,4"),
        (["--seconds", "0.5"], "seconds is 0.5, must not be below 1"),
        (["--json", "/nowhere/f.json"], "json: /nowhere/f.json cannot be written: No such file"),
        (["--edge-cpu", "4096"], "edge_cpu is 4096, must be one of"),
        (["--url", "ws://h:1", "--process", "edge=999999999"], "process: there is no process"),
    ],
)
def test_flags_that_cannot_work_are_named(flags: list[str], message: str) -> None:
    code, output = run_command("bench", "fabric", *flags)
    assert code == 2, output
    assert message in output


@pytest.mark.parametrize("url", ["ws://127.0.0.1:9", "grpc://127.0.0.1:9"])
def test_server_that_does_not_answer_is_an_error(url: str) -> None:
    code, output = run_command("bench", "fabric", "--url", url, "--open-timeout-s", "1")
    assert code == 1, output
    assert "no session could be opened" in output


def test_time_for_one_stop_of_a_worker_is_enough() -> None:
    assert FabricBench(workers=2, restart_every_s=10, seconds=20).stop_plan[0] == 10


def test_protocol_follows_the_url() -> None:
    assert FabricBench().protocols == ("B",)
    assert FabricBench(url="wss://h:1").protocols == ("B",)
    assert FabricBench(url="grpc://h:1").protocols == ("grpc",)
    assert FabricBench(dialects=("A", "C")).protocols == ("A", "C")


def test_every_flag_has_help() -> None:
    shown = run_command("bench", "fabric", "--help")[1]
    flags = [name.replace("_", "-") for name in FabricBench.__dataclass_fields__]
    names = {"dialects": "dialect", "processes": "process"}
    assert not [flag for flag in flags if f"--{names.get(flag, flag)}" not in shown]
