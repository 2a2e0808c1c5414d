"""Clients of OpenAI's protocols, unchanged, against a whole fabric with the default model."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import orjson
import pytest
import soundfile
from support.client_packages import needs_node_clients, needs_python_clients, run_client
from support.fabric.real_fabric import RealFabric
from support.paths import ROOT

from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.fabric.audio import resample_pcm
from duplane.worker.checkpoints import DEFAULT_CHECKPOINT

pytestmark = pytest.mark.slow
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


@needs_python_clients
async def test_the_model_answers_the_live_client_for_python(
    fabric: RealFabric, tmp_path: Path
) -> None:
    sessions: list[str] = []
    for sound in FORMATS:
        file = tmp_path / f"{sound.rate_hertz}.pcm"
        file.write_bytes(questions(sound))
        sessions.append(f"audio/pcm:{sound.rate_hertz}:{file}")
    url = f"http://{fabric.edge}/v1"
    output = await run_client("live.py", url, *sessions)
    told = [orjson.loads(line) for line in output.splitlines()]
    assert ["".join(each["texts"]) for each in told] == [" ".join(ANSWERS)] * len(FORMATS)
    assert [each["last"].get("reason") for each in told] == ["close_requested"] * len(FORMATS)
    await fabric.all_free()


@needs_node_clients
async def test_the_model_answers_the_live_client_for_node(
    fabric: RealFabric, tmp_path: Path
) -> None:
    sound = tmp_path / "questions.pcm"
    sound.write_bytes(questions(FORMATS[0]))
    arguments = (f"http://{fabric.edge}/v1", str(FORMATS[0].rate_hertz), str(sound))
    output = await run_client("live.mjs", *arguments)
    assert output.decode().splitlines() == [" ".join(ANSWERS), "close_requested"]
    await fabric.all_free()
