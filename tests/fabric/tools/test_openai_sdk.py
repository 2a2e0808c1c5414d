"""Clients of OpenAI's protocols, unchanged, against a whole fabric with the default model."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import orjson
import pybase64
import pytest
import soundfile
from support.client_packages import (
    checked_kinds,
    needs_node_clients,
    needs_python_clients,
    run_client,
)
from support.fabric.real_fabric import RealFabric
from support.paths import ROOT
from support.time_limits import WITHIN_S

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
# Units that wait for the device or the conversation: clients send all sound at once.
WAITING = {"DUPLANE_INBOX_UNIT_COUNT": "32", "DUPLANE_EARLY_UNIT_COUNT": "32"}


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    checkpoint = str(DEFAULT_CHECKPOINT)
    async with RealFabric.running(checkpoint, **WAITING) as fabric:
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
@needs_python_clients  # which have the types of all events
async def test_the_model_answers_the_live_client_for_node(
    fabric: RealFabric, tmp_path: Path
) -> None:
    sound = tmp_path / "questions.pcm"
    sound.write_bytes(questions(FORMATS[0]))
    arguments = (f"http://{fabric.edge}/v1", str(FORMATS[0].rate_hertz), str(sound))
    *events, told = (await run_client("live.mjs", *arguments)).splitlines()
    assert orjson.loads(told) == {"text": " ".join(ANSWERS), "reason": "close_requested"}
    assert "session.output_audio.delta" in (await checked_kinds("live", events))["server"]
    await fabric.all_free()


@pytest.mark.parametrize(
    ("script", "scheme"),
    [
        pytest.param("openai_realtime.py", "http", marks=needs_python_clients),
        pytest.param("agents_realtime.py", "ws", marks=needs_python_clients),
        pytest.param("agents_realtime.mjs", "ws", marks=needs_node_clients),
    ],
)
@needs_python_clients  # which have the types of all events
async def test_the_model_answers_realtime_clients(
    fabric: RealFabric, tmp_path: Path, script: str, scheme: str
) -> None:
    sound = tmp_path / "questions.pcm"
    sound.write_bytes(questions(FORMATS[0]))
    output = await run_client(script, f"{scheme}://{fabric.edge}/v1", str(sound))
    *events, told = output.splitlines()
    assert orjson.loads(told) == {"answers": ANSWERS, "faults": []}
    kinds = (await checked_kinds("realtime", events))["server"]
    assert {"session.created", "response.output_audio.delta", "response.done"} <= set(kinds)
    assert "error" not in kinds
    await fabric.all_free()


@needs_python_clients
async def test_the_model_answers_the_client_of_chat_completions(
    fabric: RealFabric, tmp_path: Path
) -> None:
    samples, rate_hertz = soundfile.read(QUESTIONS, dtype="float32")
    question = tmp_path / "question.wav"
    soundfile.write(question, samples[: 2 * rate_hertz], rate_hertz)
    url = f"http://{fabric.edge}/v1"
    told = orjson.loads(await run_client("completions.py", url, str(question)))
    assert told["heard"] > 0  # in a chat, the default model answers only typed questions
    (name, again) = told["models"]
    assert name == again == told["text"]["model"]
    assert told["text"]["content"] == told["gathered_stream"] == ANSWERS[0]
    streamed = told["streamed_text"]
    assert (streamed["content"], streamed["role"]) == (ANSWERS[0], "assistant")
    assert streamed["finish_reason"] == "stop"
    assert streamed["total_tokens"] > 0
    speech = told["speech"]
    assert speech["transcript"] == told["streamed_speech"]["transcript"] == ANSWERS[0]
    samples, rate_hertz = soundfile.read(io.BytesIO(pybase64.b64decode(speech["wav"])))
    assert rate_hertz == 24_000
    assert samples.std() > 0.01
    assert told["streamed_speech"]["pcm_bytes"] >= rate_hertz
    assert told["faults"] == [
        ["BadRequestError", "unsupported_parameter", "n"],
        ["BadRequestError", "invalid_value", "temperature"],
        ["BadRequestError", "unsupported_parameter", "stop"],
    ]
    await fabric.all_free()


@needs_python_clients
async def test_the_model_answers_the_realtime_client_with_manual_turns(
    fabric: RealFabric, tmp_path: Path
) -> None:
    file = tmp_path / "question.pcm"
    file.write_bytes(questions(FORMATS[0])[: 2 * 2 * FORMATS[0].rate_hertz])
    told = orjson.loads(
        await run_client("realtime_turns.py", f"http://{fabric.edge}/v1", str(file))
    )
    typed, (heard, again) = told["typed"], told["spoken"]
    assert (typed["text"], typed["sound_s"]) == (ANSWERS[0], 0)
    assert typed["last"]["response"]["status"] == "completed"
    usage = heard["last"]["response"]["usage"]
    # In a chat, the default model answers only typed questions.
    assert usage["input_token_details"]["audio_tokens"] > 0
    assert again["text"] == ANSWERS[0]
    assert again["sound_s"] > 0.5
    await fabric.all_free()


async def run(commands: str, folder: Path) -> str:
    """Run commands of a page in a shell; return what they write."""
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", commands),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            output, errors = await shell.communicate()
    finally:
        if shell.returncode is None:
            shell.kill()
            await shell.wait()
    assert shell.returncode == 0, errors.decode()
    return output.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_examples_of_the_page_do_what_it_says(fabric: RealFabric, tmp_path: Path) -> None:
    page = (ROOT / "docs/completions.md").read_text()
    examples = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    told = [await run(each.replace("127.0.0.1:8006", fabric.edge), tmp_path) for each in examples]
    models, text, stream, spoken, heard = told
    assert orjson.loads(models)["data"]
    assert orjson.loads(text)["choices"][0]["message"]["content"] == ANSWERS[0]
    *chunks, usage, last = [line.removeprefix("data: ") for line in stream.split("\n") if line]
    assert last == "[DONE]"
    assert orjson.loads(usage)["usage"]["total_tokens"] > 0
    words = [orjson.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(words) == ANSWERS[1]
    assert spoken.strip() == ANSWERS[0]
    samples, rate_hertz = soundfile.read(tmp_path / "answer.wav")
    assert rate_hertz == 24_000
    assert samples.std() > 0.01
    assert orjson.loads(heard)["usage"]["prompt_tokens_details"]["audio_tokens"] > 0
    await fabric.all_free()
