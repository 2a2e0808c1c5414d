"""`duplane up` after two interrupts: it closes its calls, shows its report, logs no traceback.

With `--log-format json`, every line that it and its processes print is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import Any

import orjson
import psutil
from support.fabric.processes import alive
from support.fabric.real_fabric import Client, RealFabric
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from duplane.fabric.process import EXIT_CANNOT_START, EXIT_INTERRUPTED

CHAT = {
    "messages": [{"role": "user", "content": "word " * 8000}],  # the script repeats every word
    "streaming": True,
    "generation": {"max_new_tokens": 8000},
    "tts": {"enabled": False},
}
WORD_S = "0.05"  # 8000 words last for 400 s: longer than the test may take


async def last_event(connection: ClientConnection) -> dict[str, Any]:
    """Return the last event before the end of the connection."""
    event: dict[str, Any] = {}
    with contextlib.suppress(ConnectionClosed):
        while True:
            event = orjson.loads(await connection.recv())
    return event


async def test_second_interrupt_closes_every_call_with_1001_and_without_a_traceback() -> None:
    async with (
        RealFabric.starting("scripted", DUPLANE_SCRIPTED_UNIT_S=WORD_S) as fabric,
        connect(fabric.url, proxy=None) as duplex,
        connect(f"ws://{fabric.edge}/ws/chat", proxy=None) as chat,
    ):
        children = psutil.Process(fabric.process.pid).children(recursive=True)
        client = Client(duplex)
        await client.begin()
        await client.exchange()
        await chat.send(orjson.dumps(CHAT), text=True)
        while orjson.loads(await chat.recv())["type"] != "chunk":
            pass
        chat_end = asyncio.create_task(last_event(chat))

        async def drains() -> bool:
            return any("draining" in line for line in fabric.log)

        fabric.process.send_signal(signal.SIGINT)
        await until(drains, WITHIN_S)
        await client.exchange()  # running sessions go on
        await client.send_unit()
        fabric.process.send_signal(signal.SIGINT)
        ended = await last_event(duplex)
        assert (ended, duplex.close_code) == (
            {"type": "session.closed", "reason": "server_shutdown"},
            1001,
        )
        ended = await chat_end
        assert (ended, chat.close_code) == (
            {"type": "error", "error": "Server is shutting down"},
            1001,
        )
        assert await fabric.process.wait() == EXIT_INTERRUPTED
        assert not alive(children), "a process was left"
    assert "Traceback" not in "".join(fabric.log)


async def test_report_of_a_trace_is_shown_after_the_second_interrupt_and_all_lines_are_json() -> (
    None
):
    command = ("up", "--port", "0", "--checkpoint", "scripted", "--trace", "--log-format", "json")
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duplane.tools", *command),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    assert up.stderr
    messages: list[str] = []

    async def until_line(text: str) -> str:
        assert up.stderr
        while line := await up.stderr.readline():
            messages.append(orjson.loads(line)["message"])
            if text in messages[-1]:
                return messages[-1]
        raise AssertionError(f"up has ended without {text!r}: {messages}")

    async with asyncio.timeout(WITHIN_S):
        ready = await until_line("duplane is ready: ")
        url = next(word for word in ready.split() if word.startswith("ws://"))
        async with connect(url, proxy=None) as connection:
            client = Client(connection)
            await client.begin()
            await client.exchange()
            up.send_signal(signal.SIGINT)
            await until_line("draining")
            up.send_signal(signal.SIGINT)
            report = await until_line("ms of each stage")
        output, rest = await up.communicate()
    assert "1 units, 0 late" in report or "1 units, 1 late" in report
    assert "duplane-alive" not in report
    assert output == b""
    assert up.returncode == EXIT_INTERRUPTED
    others = [orjson.loads(line)["message"] for line in rest.splitlines()]
    assert not [message for message in messages + others if "Traceback" in message]


async def test_failed_start_is_one_json_line() -> None:
    command = ("up", "--port", "0", "--checkpoint", "/nonexistent", "--log-format", "json")
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duplane.tools", *command),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WITHIN_S):
        output, errors = await up.communicate()
    assert up.returncode == EXIT_CANNOT_START
    assert output == b""
    (line,) = (orjson.loads(line) for line in errors.splitlines())
    assert line["message"] == "checkpoint: /nonexistent is not a directory"
    assert line["level"] == "CRITICAL"
