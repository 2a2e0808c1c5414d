"""The log of `duplane up` in JSON, and signals that change the level of all its processes."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator

import orjson
import pytest
from support.edge.live_edge import UPDATE, receive, send
from websockets.asyncio.client import connect

WITHIN_S = 60.0
FIELDS = {"time", "level", "role", "logger", "message"}


class Up:
    """A running `duplane up` that logs JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.edge = ""

    async def ready(self) -> None:
        """Wait until the log says where the edge serves."""
        while not (
            found := re.search(r"ready: .*?ws://(\S+?)/", (await self.next_line())["message"])
        ):
            pass
        self.edge = found[1]

    async def next_line(self) -> dict[str, str]:
        """Return the next log line of any process."""
        assert self.process.stderr
        async with asyncio.timeout(WITHIN_S):
            return orjson.loads(await self.process.stderr.readline())

    async def session(self) -> list[dict[str, str]]:
        """Run a session; return the log lines until its slot is reported free."""
        async with connect(f"ws://{self.edge}/v1/realtime?mode=audio", proxy=None) as client:
            # The line of a free slot may come before the scheduler knows of the slot.
            while (kind := (await receive(client))["type"]) == "session.queued":
                pass
            assert kind == "session.queue_done"
            await send(client, UPDATE)
            assert (await receive(client))["type"] == "session.created"
            await send(client, {"type": "session.close", "reason": "user_stop"})
            await client.wait_closed()
        lines = [await self.next_line()]
        while lines[-1]["message"] != "slot 0: free":
            lines.append(await self.next_line())
        return lines


@pytest.fixture
async def up() -> AsyncGenerator[Up]:
    flags = ("--port", "0", "--slots", "1", "--checkpoint", "scripted", "--log-format", "json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duplane.tools", "up", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        up = Up(process)
        async with asyncio.timeout(WITHIN_S):
            await up.ready()
        yield up
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # reads what is left, up to the end of all processes


async def test_signals_change_the_level_of_every_process(up: Up) -> None:
    lines = await up.session()
    assert not [line for line in lines if line["level"] == "DEBUG"]
    roles = Counter(line["role"] for line in lines)
    assert roles.keys() <= {"up", "edge", "scheduler", "worker"}
    assert all(line.keys() >= FIELDS for line in lines)

    up.process.send_signal(signal.SIGUSR1)
    debug: list[dict[str, str]] = []
    async with asyncio.timeout(WITHIN_S):
        while {line["role"] for line in debug} != {"edge", "scheduler", "worker"}:
            debug += [line for line in await up.session() if line["level"] == "DEBUG"]
    assert all(line["session_id"].startswith("sess_") for line in debug)
    assert all("trace_id" not in line for line in debug), "nothing is exported"

    up.process.send_signal(signal.SIGUSR2)
    async with asyncio.timeout(WITHIN_S):
        while [line for line in await up.session() if line["level"] == "DEBUG"]:
            pass  # repeat until every process has received the signal
