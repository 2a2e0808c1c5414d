"""A client that a test kills: python killable_client.py URL UNITS

If the session must wait in the queue, the client prints the type of the first event and waits until
it is killed. Otherwise it sends UNITS units without reading answers, prints `sent`, and sends more
units until it is killed.

It does not use the client library, because it never reads the answers.
"""

from __future__ import annotations

import asyncio
import sys

import orjson
import pybase64
from websockets.asyncio.client import connect

SILENCE = pybase64.b64encode(bytes(64_000)).decode()


async def main(url: str, unit_count: int) -> None:
    async with connect(url) as connection:
        first = orjson.loads(await connection.recv())["type"]
        if first != "session.queue_done":
            print(first, flush=True)
            await asyncio.Event().wait()
        settings = {"type": "session.update", "session": {"instructions": "Listen."}}
        await connection.send(orjson.dumps(settings), text=True)
        await connection.recv()
        append = {"type": "input_audio_buffer.append", "audio": SILENCE}
        for _ in range(unit_count):
            await connection.send(orjson.dumps(append), text=True)
        print("sent", flush=True)
        while True:
            await connection.send(orjson.dumps(append), text=True)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
