"""Parts of `duplane up` without a fabric: delays, the temporary directory, an interrupted start."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.fabric.processes import alive
from support.test_checkpoint.build import build_test_checkpoint
from support.time_limits import until

from duplane.fabric import process
from duplane.tools.up import supervisor
from duplane.tools.up.fabric import UpSettings, metrics_ports
from duplane.tools.up.restarts import FIRST_DELAY_S, MAX_DELAY_S, STABLE_S, RestartDelay
from duplane.tools.up.supervisor import Role

pytestmark = pytest.mark.slow

WITHIN_S = 60.0
AT_ONCE_S = 20.0


def test_delays_double_up_to_a_bound_and_begin_anew_after_a_stable_run() -> None:
    delay = RestartDelay()
    delays = [delay.after_exit(ran_s=1.0) for _ in range(12)]
    assert delays[:4] == [FIRST_DELAY_S * 2**n for n in range(4)]
    assert delays[-1] == MAX_DELAY_S
    assert delays == sorted(delays)
    assert delay.after_exit(ran_s=STABLE_S) == FIRST_DELAY_S
    assert delay.after_exit(ran_s=1.0) == 2 * FIRST_DELAY_S


async def test_role_that_waits_to_be_started_again_stops_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    role = Role("worker", (), "127.0.0.1:0")
    exits = asyncio.Semaphore(0)

    async def run_once() -> int:
        role._on_line("duplane-ready worker 127.0.0.1:1")
        exits.release()
        return 1

    monkeypatch.setattr(role, "_run_once", run_once)
    running = asyncio.create_task(role.keep_running())
    async with asyncio.timeout(WITHIN_S):
        await exits.acquire()
        await role.drain()
        await running
    assert exits.locked(), "it was started again"


async def test_role_is_started_again_only_after_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    role = Role("worker", (), "127.0.0.1:0")
    begins_s: list[float] = []

    async def run_once() -> int:
        begins_s.append(time.monotonic())
        role._on_line("duplane-ready worker 127.0.0.1:1")
        if len(begins_s) == 2:
            await role.drain()
        return 1

    monkeypatch.setattr(role, "_run_once", run_once)
    async with asyncio.timeout(WITHIN_S):
        await role.keep_running()
    first_s, second_s = begins_s
    assert second_s - first_s >= FIRST_DELAY_S - 0.002  # uvloop counts in whole milliseconds


async def test_frozen_process_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "HUNG_S", 3 * process.ALIVE_S)
    role = Role("scheduler", ("scheduler",), "127.0.0.1:0")
    running = asyncio.create_task(role.keep_running())
    try:
        async with asyncio.timeout(WITHIN_S):
            address = await role.ready()
            frozen = psutil.Process(role.process_id)
            frozen.suspend()

            async def is_replaced() -> bool:
                return role.process_id != frozen.pid

            await until(is_replaced, WITHIN_S)
            assert await role.ready() == address
    finally:
        await role.stop()
        await running


def test_metrics_have_a_port_for_each_process_in_a_row() -> None:
    assert list(metrics_ports(UpSettings())) == []
    assert list(metrics_ports(UpSettings(metrics_port=9100, worker_count=2))) == [
        *range(9100, 9104)
    ]


@pytest.mark.parametrize(("port", "workers"), [(65_535, 1), (65_533, 2), (0, 1), (-1, 1)])
def test_metrics_port_without_room_for_every_process_is_refused(port: int, workers: int) -> None:
    with pytest.raises(ValueError, match=r"^metrics_port is "):
        UpSettings(metrics_port=port, worker_count=workers)


OWNER = """
import sys
from duplane.tools.up.temporary import temporary_directory
with temporary_directory("duplane-test-") as directory:
    (directory / "file").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("sent", [None, signal.SIGKILL])
def test_temporary_directory_is_deleted_however_its_owner_ends(
    sent: signal.Signals | None,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        directory = Path(owner.stdout.readline().strip())
        assert (directory / "file").exists()
        if sent:
            owner.send_signal(sent)
    deadline = time.monotonic() + WITHIN_S
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small") / "checkpoint"
    build_test_checkpoint(directory)
    return directory


@pytest.mark.parametrize("progress", ["building", "starting the scheduler", "loading the model"])
async def test_interrupted_start_ends_at_once(progress: str, checkpoint: Path) -> None:
    source = "random" if progress == "building" else str(checkpoint)
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duplane.tools", "up", "--port", "0", "--checkpoint", source),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert up.stderr
    lines: list[str] = []
    async with asyncio.timeout(WITHIN_S):
        while line := (await up.stderr.readline()).decode():
            lines.append(line)
            if progress in line:
                break
        else:
            pytest.fail(f"up ended by itself: {lines}")
        children = psutil.Process(up.pid).children(recursive=True)
        up.send_signal(signal.SIGINT)
        begin_s = time.monotonic()
        output, errors = await up.communicate()
        assert time.monotonic() - begin_s < AT_ONCE_S
    assert up.returncode == 130
    assert not output
    assert b"Traceback" not in errors
    assert not alive(children), "a process was left"
