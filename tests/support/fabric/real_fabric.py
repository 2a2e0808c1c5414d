"""The whole fabric as a user starts it: `duplane up` with real processes and a tiny checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import psutil
import pybase64
from support.fabric.processes import alive
from support.monitoring.otlp import SpanReceiver
from support.speech import speech_like
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import ClientConnection

DUPLANE = (sys.executable, "-m", "duplane.tools")
SLOTS = 2


@dataclass
class RealFabric:
    """A running `duplane up` with SLOTS slots."""

    process: asyncio.subprocess.Process
    edge: str
    scheduler: str
    spans: SpanReceiver
    log: list[str]  # lines of the processes on stderr

    @property
    def url(self) -> str:
        return f"ws://{self.edge}/v1/realtime?mode=audio"

    @classmethod
    @contextlib.asynccontextmanager
    async def starting(
        cls, checkpoint: str = "random", duplane: Sequence[str] = DUPLANE, **environment: str
    ) -> AsyncGenerator[RealFabric]:
        """Start a fabric, whose processes are killed at the end if they still run."""
        async with SpanReceiver.serving() as spans:
            model = ("--checkpoint", checkpoint) if checkpoint else ()  # "": that of the package
            up = await asyncio.create_subprocess_exec(
                *(*duplane, "up", "--port", "0", "--slots", str(SLOTS), *model),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={
                    **os.environ,
                    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{spans.address}",
                    "OTEL_EXPORTER_OTLP_INSECURE": "true",
                    "OTEL_BSP_SCHEDULE_DELAY": "100",
                    **environment,
                },
            )
            assert up.stdout
            assert up.stderr
            log: list[str] = []
            logging = asyncio.create_task(_read_log(up.stderr, log))
            try:
                line = (await up.stdout.readline()).decode()
                ready = re.match(
                    r"duplane is ready: http://localhost:\d+/ ws://(\S+?)/\S* \S* grpc://(\S+)",
                    line,
                )
                assert ready, line
                assert checkpoint != "random" or "mean nothing" in line
                yield cls(up, ready[1], ready[2], spans, log)
            finally:
                if up.returncode is None:
                    up.kill()
                    await up.wait()
                await logging

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, checkpoint: str = "random", duplane: Sequence[str] = DUPLANE, **environment: str
    ) -> AsyncGenerator[RealFabric]:
        """Start a fabric; stop it at the end, and assert that no process is left."""
        async with cls.starting(checkpoint, duplane, **environment) as fabric:
            yield fabric
            children = psutil.Process(fabric.process.pid).children(recursive=True)
            fabric.process.send_signal(signal.SIGINT)
            assert await fabric.process.wait() == 0
            assert not alive(children), "a process was left"

    def role(self, name: str) -> psutil.Process:
        """Return the process of one role."""
        roles = psutil.Process(self.process.pid).children()
        return next(role for role in roles if name in role.cmdline())

    def kill(self, name: str) -> None:
        """Kill all processes of one role."""
        for role in psutil.Process(self.process.pid).children():
            if name in role.cmdline():
                role.kill()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        return await asyncio.to_thread(get_json, f"http://{self.edge}{path}")

    async def status(self) -> dict[str, Any]:
        return (await self.get("/status"))[1]

    async def all_free(self) -> None:
        """Wait until all slots are free, no lease is held, and no client waits."""

        async def is_free() -> bool:
            status = await self.status()
            return (
                status.get("free_slot_count") == SLOTS
                and status["lease_count"] == 0
                and status["ticket_count"] == 0
            )

        await until(is_free, WITHIN_S)


async def _read_log(stream: asyncio.StreamReader, lines: list[str]) -> None:
    """Store each line, and write it to stderr."""
    async for line in stream:
        lines.append(line.decode(errors="replace"))
        sys.stderr.write(lines[-1])


def get_json(url: str) -> tuple[int, dict[str, Any]]:
    """Return the status code and the JSON of an answer."""
    try:
        with urllib.request.urlopen(url, timeout=WITHIN_S) as response:
            return response.status, orjson.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


class Client:
    """A client of dialect A that sends each unit as soon as the previous one is answered.

    It does not use the client library: tests compare the events themselves, and break connections
    at times at which the library would not.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.speech = speech_like(seconds=64)
        self.sent = 0

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(WITHIN_S):
            return orjson.loads(await self.connection.recv())

    async def begin(self) -> None:
        """Wait for a slot, which may still be in cleanup after the previous session."""
        while (event := await self.receive())["type"] != "session.queue_done":
            assert event["type"] in ("session.queued", "session.queue_update"), event
        await self.configure()

    async def configure(self) -> None:
        settings = {"instructions": "You are a helpful assistant."}
        await self.send({"type": "session.update", "session": settings})
        assert (await self.receive())["type"] == "session.created"

    async def send(self, message: dict[str, Any]) -> None:
        await self.connection.send(orjson.dumps(message), text=True)

    async def send_unit(self) -> None:
        start = self.sent % 64 * 16_000
        audio = pybase64.b64encode(self.speech[start : start + 16_000].tobytes()).decode()
        self.sent += 1
        await self.send({"type": "input_audio_buffer.append", "audio": audio})

    async def exchange(self) -> dict[str, Any]:
        await self.send_unit()
        answer = await self.receive()
        assert answer["type"] in ("response.listen", "response.output_audio.delta"), answer
        return answer

    async def end(self) -> None:
        await self.send({"type": "session.close", "reason": "user_stop"})
        assert (await self.receive()) == {"type": "session.closed", "reason": "stopped"}
        await self.connection.wait_closed()
        assert self.connection.close_code == 1000
