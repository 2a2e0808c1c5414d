"""LiveKit's plugin for OpenAI, unchanged and without a room. `by_hand.sh` installs it.

Arguments: `live` or `realtime`, the base URL, and a WAV file, which is sent at real-time pace.
Writes the text and the length of each utterance of the model, the faults, and the session's end.
"""

from __future__ import annotations

import asyncio
import sys
import wave

import aiohttp
from livekit import rtc
from livekit.agents import llm
from livekit.plugins import openai

PIECE_S = 0.1
TAIL_S = 5.0


def model_of(service: str, url: str, http: aiohttp.ClientSession) -> llm.RealtimeModel:
    if service == "realtime":
        return openai.realtime.RealtimeModel(
            base_url=url, api_key="any", model="gpt-realtime-2.1", http_session=http
        )
    return llm.DuplexRealtimeAdapter(
        openai.realtime.GPTLiveModel(
            base_url=url, api_key="any", delegation="client", http_session=http
        )
    )


async def hear(generation: llm.GenerationCreatedEvent) -> None:
    async for message in generation.message_stream:

        async def read(message: llm.MessageGeneration = message) -> str:
            return "".join([text async for text in message.text_stream])

        reading = asyncio.create_task(read())
        seconds = sum([frame.duration async for frame in message.audio_stream])
        print(f"{await reading!r}, {seconds:.2f} s", flush=True)


async def main(service: str, url: str, file: str) -> None:
    hearing: set[asyncio.Task[None]] = set()
    async with aiohttp.ClientSession() as http:
        session = model_of(service, url, http).session()

        def on_generation(event: llm.GenerationCreatedEvent) -> None:
            hearing.add(asyncio.create_task(hear(event)))

        session.on("generation_created", on_generation)
        session.on("error", lambda event: print("error:", event, flush=True))
        await session._update_session(
            instructions="You are a helpful assistant.", chat_ctx=llm.ChatContext.empty(), tools=[]
        )
        with wave.open(file) as sound:
            rate, count = sound.getframerate(), int(sound.getframerate() * PIECE_S)
            pieces = [sound.readframes(count) for _ in range(sound.getnframes() // count)]
        pieces += [bytes(2 * count)] * int(TAIL_S / PIECE_S)
        begin = asyncio.get_running_loop().time()
        for number, piece in enumerate(pieces):
            await asyncio.sleep(begin + number * PIECE_S - asyncio.get_running_loop().time())
            session.push_audio(rtc.AudioFrame(piece, rate, 1, count))
        await session.aclose()
        await asyncio.gather(*hearing)
    print(f"{len(hearing)} utterances")


asyncio.run(main(*sys.argv[1:]))
