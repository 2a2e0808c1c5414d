"""The client for JavaScript: the transcripts of A and B, its own tests, and its example."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.edge.live_edge import live_edge
from support.paths import ROOT
from support.protocols.client_replay import (
    TRANSCRIPTS,
    expected,
    is_told_to_clients,
    replay_server,
)
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S

from duplane.fabric.v1 import session_pb2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]

CLIENT = ROOT / "clients/javascript"
NAMES = [name for name, transcript in TRANSCRIPTS.items() if is_told_to_clients(transcript)]
EXPORT = re.compile(r"^export (?:declare )?(?:class|function|const) (\w+)", re.MULTILINE)


async def node(*arguments: str, given: bytes = b"", cwd: Path = CLIENT) -> bytes:
    """Run node, in which versions before 22 have WebSockets behind a flag."""
    program = await asyncio.create_subprocess_exec(
        *("node", "--no-warnings", "--experimental-websocket", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"NO_PROXY": "*"},
        cwd=cwd,
    )
    try:
        async with asyncio.timeout(2 * WITHIN_S):
            output, errors = await program.communicate(given)
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    assert program.returncode == 0, (output + errors).decode()
    return output


async def test_client_understands_the_transcripts() -> None:
    async with replay_server() as url:
        output = await node("test/replay.mjs", url, given="\n".join(NAMES).encode())
    seen: dict[str, Any] = dict(zip(NAMES, map(orjson.loads, output.splitlines()), strict=True))
    assert seen == {name: expected(TRANSCRIPTS[name]).to_json() for name in NAMES}


async def test_its_own_tests_pass() -> None:
    files = sorted(str(file) for file in CLIENT.glob("test/*.test.js"))
    report = await node("--test", "--test-reporter=tap", *files)
    (passed,) = re.findall(rb"^# pass (\d+)$", report, re.MULTILINE)
    assert int(passed) > len(files)


async def test_example_of_the_page_talks(tmp_path: Path) -> None:
    (example,) = re.findall(r"```js\n(.*?)```", (CLIENT / "README.md").read_text(), re.DOTALL)
    assert example in (ROOT / "README.md").read_text()
    assert len(list(filter(None, example.splitlines()))) <= 20
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules/duplane-client").symlink_to(CLIENT)
    (tmp_path / "talk.mjs").write_text(example)
    sent = np.linspace(-16_000, 16_000, 60_000).astype("<i2")
    (tmp_path / "sound.pcm").write_bytes(sent.tobytes())
    heard: list[bytes] = []

    def speak(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
        heard.append(unit.audio)
        speech = session_pb2.Speech(text="Hello.", audio=pcm(24_000))
        delta = session_pb2.Delta(sequence=unit.sequence, speech=speech, end_of_turn=True)
        return [session_pb2.ConverseResponse(delta=delta)]

    async with live_edge() as edge:
        edge.fabric.on_unit = speak
        address = f"ws://{edge.edge.address}"
        output = await node("talk.mjs", address, "sound.pcm", cwd=tmp_path)
    assert output == b"Hello."
    (unit,) = heard
    error = np.abs(np.frombuffer(unit, "<f4") - sent[: 3 * 16_000 : 3] / 32_768)[100:]
    assert error.max() < 1e-3


def test_types_name_what_the_module_exports() -> None:
    lists = re.findall(r"export \{(.*?)\}", (CLIENT / "index.js").read_text(), re.DOTALL)
    exported = {name for text in lists for name in re.findall(r"\w+", text)}
    assert set(EXPORT.findall((CLIENT / "index.d.ts").read_text())) == exported


def test_module_is_small_and_needs_nothing() -> None:
    package = orjson.loads((CLIENT / "package.json").read_bytes())
    assert "dependencies" not in package
    files = sorted(CLIENT.glob("*.js"))
    assert len(files) <= 7
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) < 13_000
    for file in files:
        for imported in re.findall(r'from "(.*?)"', file.read_text()):
            assert imported.startswith("./"), f"{file.name} imports {imported}"
