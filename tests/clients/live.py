"""The Live client of `openai` for Python, unchanged, in a process of its own.

Arguments: the base URL, and for each session TYPE:RATE:FILE: the format of the sound, and a file
with the sound, which is sent in pieces of a second. Checks each event by the types of the package,
and writes one line for each session: its texts, the sound of each event, and the last event.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types.live import ConnectServerEvent
from pydantic import TypeAdapter

ADAPTER: TypeAdapter[Any] = TypeAdapter(ConnectServerEvent)


async def converse(client: AsyncOpenAI, name: str, rate: int, sound: bytes) -> dict[str, Any]:
    second_bytes = rate * (2 if name == "audio/pcm" else 1)
    count = len(sound) // second_bytes
    session: Any = {
        "model": "gpt-live-1",
        "instructions": "You are a helpful assistant.",
        "audio": {"format": {"type": name, "rate": rate}},
    }
    texts: list[str] = []
    pieces: list[str] = []
    async with client.live.connect() as connection:
        await connection.send({"type": "session.start", "session": session})
        while True:
            event = ADAPTER.validate_json(await connection.recv_bytes(), strict=True)
            match event.type:
                case "session.started":
                    for at in range(0, count * second_bytes, second_bytes):
                        piece = base64.b64encode(sound[at : at + second_bytes])
                        await connection.send(
                            {"type": "session.input_audio.append", "audio": piece.decode()}
                        )
                case "session.output_transcript.delta":
                    texts.append(event.delta)
                case "session.output_audio.delta":
                    pieces.append(event.delta)
                case "session.usage.updated" if event.usage.seconds >= count:
                    await connection.send({"type": "session.close"})
                case "session.closed" | "error":
                    return {"texts": texts, "pieces": pieces, "last": event.to_dict()}


async def main(url: str, *sessions: str) -> None:
    async with AsyncOpenAI(api_key="K-0123456789", base_url=url) as client:
        for each in sessions:
            name, rate, file = each.split(":")
            sound = await asyncio.to_thread(Path(file).read_bytes)
            told = await converse(client, name, int(rate), sound)
            sys.stdout.write(json.dumps(told) + "\n")


asyncio.run(main(*sys.argv[1:]))
