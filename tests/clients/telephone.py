"""The Realtime client of `openai` for Python, unchanged, as one of a telephone that interrupts.

Arguments: the base URL, the number of the response that is cancelled when its sound begins, and a
file with sound in G.711 (mu-law). Checks each event by the types of the package, and writes the
responses, the bytes of sound of each, the number of pieces of sound that came after their response,
and an error if there is one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

ADAPTER: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
TURNS = 4
SECOND_BYTES = 8_000


async def converse(client: AsyncOpenAI, sound: bytes, cancelled: int) -> dict[str, Any]:
    form = {"format": {"type": "audio/pcmu"}}
    session: Any = {
        "type": "realtime",
        "instructions": "You are a helpful assistant.",
        "audio": {"input": form, "output": form},
    }
    told: dict[str, Any] = {"responses": [], "sounds": {}, "late": 0, "error": None}
    async with client.realtime.connect(model="gpt-realtime-2.1") as connection:
        await connection.session.update(session=session)
        while len(told["responses"]) < TURNS and not told["error"]:
            event = ADAPTER.validate_json(await connection.recv_bytes(), strict=True)
            match event.type:
                case "session.updated":
                    for at in range(0, len(sound), SECOND_BYTES):
                        piece = base64.b64encode(sound[at : at + SECOND_BYTES])
                        await connection.input_audio_buffer.append(audio=piece.decode())
                case "response.output_audio.delta":
                    sounds = told["sounds"]
                    count = len(base64.b64decode(event.delta))
                    told["late"] += any(event.response_id == each[0] for each in told["responses"])
                    if event.response_id not in sounds and len(told["responses"]) + 1 == cancelled:
                        await connection.response.cancel()
                    sounds[event.response_id] = sounds.get(event.response_id, 0) + count
                case "response.done":
                    done = event.response
                    texts = [part.transcript for item in done.output for part in item.content]
                    told["responses"].append([done.id, done.status, " ".join(texts)])
                case "error":
                    told["error"] = event.to_dict()
                case _:
                    pass
    told["sounds"] = list(told["sounds"].values())
    return told


async def main(url: str, cancelled: str, file: str) -> None:
    sound = await asyncio.to_thread(Path(file).read_bytes)
    async with AsyncOpenAI(api_key="K-0123456789", base_url=url) as client:
        json.dump(await converse(client, sound, int(cancelled)), sys.stdout)


asyncio.run(main(*sys.argv[1:]))
