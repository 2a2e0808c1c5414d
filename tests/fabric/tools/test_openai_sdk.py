"""The Live clients of `openai`, unchanged, against a whole fabric with the default model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pybase64
import pytest
import soundfile
from pydantic import TypeAdapter
from support.fabric.real_fabric import RealFabric
from support.paths import ROOT
from support.time_limits import WITHIN_S

from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.fabric.audio import resample_pcm
from duplane.worker.checkpoints import DEFAULT_CHECKPOINT

openai = pytest.importorskip("openai", reason="openai is not installed: make setup")
ConnectServerEvent = pytest.importorskip("openai.types.live").ConnectServerEvent

pytestmark = pytest.mark.slow
CLIENTS = ROOT / "tests/clients"
QUESTIONS = ROOT / "tools/duplane/tools/talk/samples/questions.wav"
ANSWERS = [
    "hello how can i help you",
    "two plus three is five",
    "the sky is blue",
    "you are welcome",
]
UNITS = 20
FORMATS = [SoundFormat(Encoding.INT16, 24_000), SoundFormat(Encoding.INT16, 16_000)]
INBOX = "32"  # units that wait for the device, so that none is dropped


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    checkpoint = str(DEFAULT_CHECKPOINT)
    async with RealFabric.running(checkpoint, DUPLANE_INBOX_UNIT_COUNT=INBOX) as fabric:
        yield fabric


def questions(sound: SoundFormat) -> bytes:
    """Return the questions and silence after them."""
    samples, rate_hertz = soundfile.read(QUESTIONS, dtype="float32")
    pcm = resample_pcm(samples.tobytes(), rate_hertz, sound.rate_hertz)
    return sound.encode(pcm.ljust(4 * UNITS * sound.rate_hertz, b"\0"))


def pieces(sound: SoundFormat) -> list[str]:
    """Return the questions in pieces of a second."""
    whole = questions(sound)
    size = len(whole) // UNITS
    return [pybase64.b64encode(whole[at : at + size]).decode() for at in range(0, len(whole), size)]


@pytest.mark.parametrize("sound", FORMATS, ids=lambda sound: str(sound.rate_hertz))
async def test_the_model_answers_the_four_questions(fabric: RealFabric, sound: SoundFormat) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ConnectServerEvent)
    client = openai.AsyncOpenAI(api_key="x", base_url=f"http://{fabric.edge}/v1")
    form = {"type": "audio/pcm", "rate": sound.rate_hertz}
    session = {
        "model": "gpt-live-1",
        "instructions": "You are a helpful assistant.",
        "audio": {"format": form},
    }
    words = ""
    async with asyncio.timeout(WITHIN_S), client, client.live.connect() as connection:
        await connection.send({"type": "session.start", "session": session})
        kind = ""
        while kind != "session.closed":
            event = adapter.validate_json(await connection.recv_bytes(), strict=True)
            kind = event.type
            assert kind != "error", event
            if kind == "session.started":
                for piece in pieces(sound):
                    await connection.send({"type": "session.input_audio.append", "audio": piece})
            elif kind == "session.output_transcript.delta":
                words += event.delta
            elif kind == "session.usage.updated" and event.usage.seconds >= UNITS:
                await connection.send({"type": "session.close"})
    assert " ".join(words.split()) == " ".join(ANSWERS)
    await fabric.all_free()


@pytest.mark.skipif(not (CLIENTS / "node_modules").exists(), reason="not installed: make clients")
async def test_the_model_answers_the_client_for_node(fabric: RealFabric, tmp_path: Path) -> None:
    sound = tmp_path / "questions.pcm"
    sound.write_bytes(questions(FORMATS[0]))
    arguments = (f"http://{fabric.edge}/v1", str(FORMATS[0].rate_hertz), str(sound))
    client = await asyncio.create_subprocess_exec(
        *("node", str(CLIENTS / "live.mjs"), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WITHIN_S):
        output, errors = await client.communicate()
    assert client.returncode == 0, errors.decode()
    assert output.decode().splitlines() == [" ".join(ANSWERS), "close_requested"]
    await fabric.all_free()
