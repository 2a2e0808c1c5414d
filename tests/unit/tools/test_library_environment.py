"""The command sets the environment of libraries before they start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

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
import grpc
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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = ("-m", "duplane.tools", "scheduler", "--listen", address)
        ran = subprocess.run(
            [sys.executable, *command, "--log-format", "json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    (line,) = (orjson.loads(line) for line in ran.stderr.splitlines())
    assert line["message"].startswith(f"cannot listen on {address}")
    assert (ran.returncode, ran.stdout) == (1, "")


BESIDE_CHANNELS = """
import duplane.tools.library_environment
import asyncio, grpc.aio, uvloop

async def answer(requests, context):
    async for request in requests:
        yield request

async def call(address):
    async with grpc.aio.insecure_channel(address) as channel:
        stream = channel.stream_stream("/test/Answer")()
        while True:
            await stream.write(bytes(1000))
            await stream.read()

async def codes():
    server = grpc.aio.server()
    handlers = {"Answer": grpc.stream_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    calls = [asyncio.create_task(call(address)) for _ in range(4)]
    for _ in range(100):
        children = [await asyncio.create_subprocess_exec("true") for _ in range(4)]
        for child in children:
            print(await child.wait())
    for running in calls:
        running.cancel()
    await asyncio.wait(calls)
    await server.stop(None)

uvloop.run(codes())
"""


@pytest.mark.slow
def test_a_program_started_beside_busy_channels_does_not_crash() -> None:
    environment = {**os.environ}
    environment.pop("GRPC_ENABLE_FORK_SUPPORT", None)
    ran = subprocess.run(
        [sys.executable, "-c", BESIDE_CHANNELS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.stdout.split(), ran.returncode) == (["0"] * 400, 0), ran.stderr[-2000:]


def test_onnx_runtime_keeps_no_identifier_of_the_machine(tmp_path: Path) -> None:
    """It would send the identifier, with facts about the models, to its vendor."""
    suppressing = {"CI", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}
    kept = {name: value for name, value in os.environ.items() if name not in suppressing}
    subprocess.run(
        [sys.executable, "-c", "import duplane.tools.library_environment, onnxruntime"],
        env={**kept, "HOME": str(tmp_path)},
        timeout=60,
        check=True,
    )
    assert not list(tmp_path.rglob("deviceid"))
