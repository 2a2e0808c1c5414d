"""`duplane up` after two interrupts: it closes its calls normally and logs no traceback."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import orjson
import psutil
from support.fabric.processes import alive
from support.fabric.real_fabric import Client, RealFabric, until
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from duplane.fabric.process import EXIT_INTERRUPTED

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
