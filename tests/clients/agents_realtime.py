"""The Realtime client of `openai-agents` for Python, unchanged.

Arguments: the base URL (ws://), and a file of int16 samples at 24 kHz, which is sent at once. Ends
after four answers. Writes each event of the server as one line, and then the answers and the
faults.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from agents.realtime import RealtimeAgent, RealtimeRunner

ANSWER_COUNT = 4


async def main(url: str, file: str) -> None:
    sound = await asyncio.to_thread(Path(file).read_bytes)
    agent = RealtimeAgent(name="assistant", instructions="You are a helpful assistant.")
    session = await RealtimeRunner(agent).run(
        model_config={
            "url": f"{url}/realtime?model=gpt-realtime-2.1",
            "api_key": "any",
        }
    )
    answers: list[str] = []
    faults: list[str] = []
    async with session:
        await session.send_audio(sound)
        async for event in session:
            if event.type in ("error", "audio_interrupted", "guardrail_tripped"):
                faults.append(str(event))
            if event.type != "raw_model_event":
                continue
            if event.data.type == "exception":
                faults.append(str(event.data))
            elif event.data.type == "raw_server_event":
                print(json.dumps(event.data.data))
                if event.data.data["type"] == "response.output_audio_transcript.done":
                    answers.append(event.data.data["transcript"])
            elif event.data.type == "turn_ended" and len(answers) == ANSWER_COUNT:
                break
    print(json.dumps({"answers": answers, "faults": faults}))


asyncio.run(main(*sys.argv[1:]))
