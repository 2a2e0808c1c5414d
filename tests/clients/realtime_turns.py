"""The Realtime client of `openai` for Python with manual turns, in a process of its own.

Arguments: the base URL, and a file with a question as PCM16 at 24 kHz. Asks by text, then by a
button: it commits the sound and asks for a response. Checks each event by the types of the package,
and writes one JSON object: the last event of each response, and the seconds of its sound.
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
HELLO: Any = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "hello"}],
}
PIECE_BYTES = 4800  # 100 ms


async def response(connection: Any) -> dict[str, Any]:
    """Ask for a response, and read it to its end."""
    await connection.response.create()
    text, sound_bytes = "", 0
    while True:
        event = ADAPTER.validate_json(await connection.recv_bytes(), strict=True)
        match event.type:
            case "response.output_text.delta" | "response.output_audio_transcript.delta":
                text += event.delta
            case "response.output_audio.delta":
                sound_bytes += len(base64.b64decode(event.delta))
            case "error":
                raise RuntimeError(event.error.message)
            case "response.done":
                return {"text": text, "sound_s": sound_bytes / 48_000, "last": event.to_dict()}
            case _:
                pass


async def typed(client: AsyncOpenAI) -> dict[str, Any]:
    async with client.realtime.connect(model="gpt-realtime") as connection:
        session: Any = {"type": "realtime", "output_modalities": ["text"]}
        await connection.session.update(session=session)
        await connection.conversation.item.create(item=HELLO)
        return await response(connection)


async def push_to_talk(client: AsyncOpenAI, sound: bytes) -> list[dict[str, Any]]:
    async with client.realtime.connect(model="gpt-realtime") as connection:
        session: Any = {
            "type": "realtime",
            "audio": {"input": {"turn_detection": None}},
            "max_output_tokens": 20,
        }
        await connection.session.update(session=session)
        for at in range(0, len(sound), PIECE_BYTES):
            piece = base64.b64encode(sound[at : at + PIECE_BYTES]).decode()
            await connection.input_audio_buffer.append(audio=piece)
        await connection.input_audio_buffer.commit()
        heard = await response(connection)
        await connection.conversation.item.create(item=HELLO)
        return [heard, await response(connection)]


async def main(url: str, file: str) -> None:
    sound = await asyncio.to_thread(Path(file).read_bytes)
    async with AsyncOpenAI(api_key="K-0123456789", base_url=url) as client:
        told = {"typed": await typed(client), "spoken": await push_to_talk(client, sound)}
    json.dump(told, sys.stdout)


asyncio.run(main(*sys.argv[1:]))
