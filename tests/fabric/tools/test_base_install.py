"""A base install, which has no extras: it serves the scripted model, and names what it lacks."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import numpy as np
import pybase64
import pytest
import soundfile
from support.fabric.base_install import install_base
from support.fabric.real_fabric import Client, RealFabric
from websockets.asyncio.client import connect

from duplane.worker.checkpoints import DEFAULT_CHECKPOINT

pytestmark = pytest.mark.slow
LACKING = ("torch", "transformers", "tokenizers", "safetensors", "jinja2", "PIL", "av", "jwt")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the wheel, is not installed: make setup")
    return install_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
async def fabric(programs: Path) -> AsyncGenerator[RealFabric]:
    duplane = (str(programs / "duplane"),)
    async with RealFabric.running("scripted", duplane, PYTHONPATH="") as fabric:
        yield fabric


def run(program: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        (program, *arguments), capture_output=True, text=True, check=False, cwd=program.parent
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", LACKING)
def test_base_install_has_no_package_of_the_extras(programs: Path, module: str) -> None:
    code, error = run(programs / "python", "-c", f"import {module}")
    assert code == 1
    assert f"No module named '{module}'" in error


async def test_wheel_without_extras_serves_a_session_of_the_scripted_model(
    fabric: RealFabric,
) -> None:
    async with connect(fabric.url) as connection:
        client = Client(connection)
        await client.begin()
        answers = [await client.exchange() for _ in range(4)]
        await client.end()
    assert any(answer["type"] == "response.output_audio.delta" for answer in answers)
    await fabric.all_free()


async def test_wheel_without_extras_talks_with_the_client_library(
    fabric: RealFabric, programs: Path
) -> None:
    url = ("--url", f"ws://{fabric.edge}", "--tail", "0")
    sound = programs / "sound.wav"
    soundfile.write(sound, np.zeros(16_000), 16_000)
    for dialect in ("A", "B"):
        talk = ("talk", str(sound), *url, "--dialect", dialect)
        code, error = await asyncio.to_thread(run, programs / "duplane", *talk)
        assert code == 0, error
    await fabric.all_free()


async def test_wheel_has_the_page_and_the_client_that_it_loads(fabric: RealFabric) -> None:
    async with aiohttp.ClientSession() as client:
        for path in ("/", "/pages/talk/talk.js", "/pages/client/session.js"):
            async with client.get(f"http://{fabric.edge}{path}") as answer:
                assert answer.status == 200
                assert len(await answer.read()) > 1000


async def test_video_in_a_chat_is_refused_with_what_is_missing(fabric: RealFabric) -> None:
    film = {"type": "video", "data": pybase64.b64encode(b"a film").decode()}
    async with connect(f"ws://{fabric.edge}/ws/chat") as connection:
        client = Client(connection)
        await client.send({"messages": [{"role": "user", "content": [film]}]})
        answer = await client.receive()
    assert answer["type"] == "error"
    assert answer["error"].endswith("the worker has no video decoder (duplane[worker])")
    await fabric.all_free()


def test_model_with_weights_names_the_extra_that_it_needs(programs: Path) -> None:
    code, error = run(programs / "duplane", "worker", "--checkpoint", str(DEFAULT_CHECKPOINT))
    assert code == 1
    assert error.rstrip().endswith("torch is not installed; install duplane[worker]")
