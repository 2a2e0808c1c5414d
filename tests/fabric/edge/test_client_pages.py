"""The examples for the client libraries hold a conversation with a live edge."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.edge.live_edge import live_edge
from support.fabric.base_install import CLIENT
from support.paths import ROOT
from support.protocols.transcripts import pcm

from duplane.fabric.v1 import session_pb2

EXAMPLES = ROOT / "tools/examples"
WORDS = ("", "Hello", " there.", "")
CLIENTS = {
    "python": (sys.executable, str(EXAMPLES / "realtime_client.py")),
    "javascript": ("node", "--experimental-websocket", str(EXAMPLES / "realtime_client.mjs")),
}


def speak(unit: session_pb2.Unit) -> Sequence[session_pb2.ConverseResponse]:
    """Answer the second and third unit with a word each, and listen to all other units."""
    delta = session_pb2.Delta(sequence=unit.sequence, listen=session_pb2.Listen())
    if word := WORDS[unit.sequence]:
        delta = session_pb2.Delta(
            sequence=unit.sequence,
            speech=session_pb2.Speech(text=word, audio=pcm(24_000)),
            end_of_turn=unit.sequence == len(WORDS) - 2,
        )
    return [session_pb2.ConverseResponse(delta=delta)]


@pytest.mark.parametrize("language", CLIENTS)
async def test_example_holds_a_conversation(language: str, tmp_path: Path) -> None:
    command = CLIENTS[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    speech = tmp_path / "speech.f32"
    speech.write_bytes(pcm(24_000))
    async with live_edge() as edge:
        edge.fabric.on_unit = speak
        arguments = (*command, f"ws://{edge.edge.address}", str(speech), str(len(WORDS)))
        client = await asyncio.create_subprocess_exec(
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(CLIENT), "NO_PROXY": "*"},
        )
        async with asyncio.timeout(60):
            output, errors = await client.communicate()
        assert client.returncode == 0, errors.decode()
    assert output.decode().strip() == "Hello there."
    assert (tmp_path / "answer.f32").read_bytes() == pcm(24_000) * 2
