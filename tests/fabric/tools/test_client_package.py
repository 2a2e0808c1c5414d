"""The client for Python, in an environment with `websockets` only, talks to a real edge."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import soundfile
from support.edge.live_edge import live_edge
from support.fabric.base_install import CLIENT, install_client, required
from support.paths import ROOT
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S

from duplane.fabric.v1 import session_pb2

pytestmark = pytest.mark.slow

SENT = np.linspace(-0.5, 0.5, 2 * 48_000, dtype=np.float32)


def test_client_needs_websockets_only() -> None:
    project = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]
    assert required(project["dependencies"]) == {"websockets"}


def test_client_has_the_version_of_duplane() -> None:
    versions = {
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
        for folder in (CLIENT, ROOT)
    }
    assert len(versions) == 1  # duplane's wheel has the same modules


@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None,
    reason="hatchling, which builds the wheel, is not installed: make setup",
)
async def test_example_of_the_page_talks(tmp_path: Path) -> None:
    python = await asyncio.to_thread(install_client, tmp_path) / "python"
    (example,) = re.findall(r"```python\n(.*?)```", (CLIENT / "README.md").read_text(), re.DOTALL)
    assert example in (ROOT / "README.md").read_text()
    assert len(list(filter(None, example.splitlines()))) <= 20
    program = tmp_path / "example.py"
    program.write_text(example)
    sound = tmp_path / "sound.wav"
    soundfile.write(sound, SENT, 48_000, subtype="PCM_16")
    heard: list[bytes] = []

    def speak(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
        heard.append(unit.audio)
        speech = session_pb2.Speech(text="Hello.", audio=pcm(24_000))
        delta = session_pb2.Delta(sequence=unit.sequence, speech=speech, end_of_turn=True)
        return [session_pb2.ConverseResponse(delta=delta)]

    async with live_edge() as edge:
        edge.fabric.on_unit = speak
        client = await asyncio.create_subprocess_exec(
            *(str(python), "-I", str(program), f"ws://{edge.edge.address}", str(sound)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "NO_PROXY": "*"},
        )
        try:
            async with asyncio.timeout(2 * WITHIN_S):
                output, errors = await client.communicate()
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
    assert client.returncode == 0, errors.decode()
    assert output.decode() == "Hello."  # the last milliseconds wait in the filter of the client
    (unit,) = heard
    exact = SENT[: 3 * 16_000 : 3]
    error = np.abs(np.frombuffer(unit, "<f4") - exact)[100:]
    assert error.max() < 1e-3
