"""A conversation over /v1/realtime in dialect A. Needs the package `websockets`.

Usage: python realtime_client.py ws://127.0.0.1:8006 speech.f32 [seconds]

`speech.f32` holds raw float32 samples, little endian, mono, 16 kHz. The model's speech is written
to `answer.f32` beside it, at 24 kHz. To make `speech.f32` from a WAV file:
ffmpeg -i speech.wav -f f32le -ac 1 -ar 16000 speech.f32
"""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import websockets

UNIT_BYTES = 4 * 16_000  # one second


async def converse(server: str, sound: bytes, seconds: int) -> tuple[str, bytes]:
    """Send `sound`, then silence, one second at a time; return the model's text and speech."""
    text = ""
    answer = bytearray()
    units = [sound[at : at + UNIT_BYTES] for at in range(0, len(sound), UNIT_BYTES)]
    units += [b""] * (seconds - len(units))
    async with websockets.connect(f"{server}/v1/realtime?mode=audio", max_size=None) as socket:
        while (await receive(socket))["type"] != "session.queue_done":
            pass  # session.queued and session.queue_update have the estimated wait
        await send(socket, type="session.update", session={"instructions": "Be brief."})
        while (await receive(socket))["type"] != "session.created":
            pass
        for unit in units[:seconds]:
            audio = base64.b64encode(unit.ljust(UNIT_BYTES, b"\0")).decode()
            await send(socket, type="input_audio_buffer.append", audio=audio)
            event = await receive(socket)  # a client with a microphone reads in another task
            if event["type"] == "response.output_audio.delta":
                text += event["text"]
                answer += base64.b64decode(event["audio"])
        await send(socket, type="session.close", reason="user_stop")
        while (await receive(socket))["type"] != "session.closed":
            pass
    return text, bytes(answer)


async def send(socket: websockets.ClientConnection, **event: object) -> None:
    """Send one event."""
    await socket.send(json.dumps(event))


async def receive(socket: websockets.ClientConnection) -> dict[str, Any]:
    """Receive one event; an `error` ends the program."""
    event: dict[str, Any] = json.loads(await socket.recv())  # noqa: TID251 - needs nothing of ours
    if event["type"] == "error":
        raise SystemExit(event["error"]["message"])
    return event


if __name__ == "__main__":
    path = Path(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 10
    said, speech = asyncio.run(converse(sys.argv[1], path.read_bytes(), count))
    path.with_name("answer.f32").write_bytes(speech)
    print(said)
