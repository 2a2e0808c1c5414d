"""A conversation over /v1/realtime in dialect A. Needs `pip install ./clients/python`.

It survives its connection, if this is lost.

Usage: python realtime_client.py ws://127.0.0.1:8006 speech.f32 [seconds]

`speech.f32` holds raw float32 samples, little endian, mono, 16 kHz. The model's speech is written
to `answer.f32` beside it, at 24 kHz. To make `speech.f32` from a WAV file:
ffmpeg -i speech.wav -f f32le -ac 1 -ar 16000 speech.f32
"""

import asyncio
import sys
from pathlib import Path

from duplane.client import DuplexError, DuplexSession

UNIT_BYTES = 4 * 16_000  # one second


async def converse(server: str, sound: bytes, seconds: int) -> tuple[str, bytes]:
    """Send `sound`, then silence, one second at a time; return the model's text and speech."""
    text = ""
    answer = bytearray()
    session = DuplexSession(
        server, dialect="A", instructions="Be brief.", uplink="float32", resumable=True
    )
    async with session:
        for at in range(0, seconds * UNIT_BYTES, UNIT_BYTES):
            unit = sound[at : at + UNIT_BYTES].ljust(UNIT_BYTES, b"\0")
            await session.send(memoryview(unit).cast("f"))
            output = await anext(session, None)  # one with a microphone reads in another task
            if output is None:
                break  # the server has ended the session
            text += output.text
            answer += output.audio.tobytes()
    return text, bytes(answer)


if __name__ == "__main__":
    path = Path(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 10
    try:
        said, speech = asyncio.run(converse(sys.argv[1], path.read_bytes(), count))
    except DuplexError as error:
        raise SystemExit(str(error)) from None
    path.with_name("answer.f32").write_bytes(speech)
    print(said)
