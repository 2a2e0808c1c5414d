"""The Realtime client of `openai` for Python, unchanged.

Arguments: the base URL, and a file of int16 samples at 24 kHz, which is sent at once. Ends after
four answers. Writes each event of the server as one line, and then the answers and the faults.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

ANSWER_COUNT = 4


async def main(url: str, file: str) -> None:
    sound = base64.b64encode(await asyncio.to_thread(Path(file).read_bytes)).decode()
    answers: list[str] = []
    faults: list[str] = []
    client = AsyncOpenAI(base_url=url, api_key="any")
    async with client.realtime.connect(model="gpt-realtime-2.1") as connection:
        await connection.session.update(
            session={"type": "realtime", "instructions": "You are a helpful assistant."}
        )
        await connection.input_audio_buffer.append(audio=sound)
        async for event in connection:
            print(event.to_json(indent=None))
            match event.type:
                case "error":
                    faults.append(event.error.message)
                case "response.output_audio_transcript.done":
                    answers.append(event.transcript)
                case "response.done" if len(answers) == ANSWER_COUNT:
                    break
                case _:
                    pass
    print(json.dumps({"answers": answers, "faults": faults}))


asyncio.run(main(*sys.argv[1:]))
