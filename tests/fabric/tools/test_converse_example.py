"""The example client ends normally, also when its last unit fails."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.fabric.plain_sessions import PlainSessions
from support.paths import ROOT
from support.protocols.transcripts import pcm
from support.scheduler.scheduler_harness import SchedulerHarness
from support.time_limits import WITHIN_S

from duplane.fabric.channel import FabricServer
from duplane.fabric.v1 import session_pb2, session_pb2_grpc

EXAMPLE = ROOT / "tools/examples/converse.py"
Response = session_pb2.ConverseResponse


class Sessions(PlainSessions):
    """A worker's servicer that listens to all units except one, which fails."""

    def __init__(self, failed: int) -> None:
        self.failed = failed
        self.units: list[session_pb2.Unit] = []

    async def Converse(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: no async
        self, requests: AsyncIterator[session_pb2.ConverseRequest], context: Any
    ) -> AsyncIterator[session_pb2.ConverseResponse]:
        async for request in requests:
            if request.HasField("unit"):
                self.units.append(request.unit)
            match request.WhichOneof("message"):
                case "claim":
                    yield Response(claimed=session_pb2.Claimed())
                case "open":
                    yield Response(opened=session_pb2.Opened())
                case "unit" if request.unit.sequence == self.failed:
                    failed = session_pb2.Failed(sequence=self.failed, reason="UNIT_TOO_LONG")
                    yield Response(failed=failed)
                case "unit":
                    listen = session_pb2.Listen()
                    delta = session_pb2.Delta(sequence=request.unit.sequence, listen=listen)
                    yield Response(delta=delta)
                case _:
                    yield Response(closed=session_pb2.Closed())
                    return


async def run_example(sessions: Sessions, file: Path) -> list[str]:
    """Run the example with a file; return the lines that it prints."""
    server = FabricServer("duplane.fabric.v1.SessionService")
    session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server.grpc)
    address = await server.start("127.0.0.1:0")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        harness = await stack.enter_async_context(SchedulerHarness.running())
        await harness.worker(address=address)
        arguments = (str(EXAMPLE), harness.address, str(file))
        example = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                out, _ = await example.communicate()
        finally:
            if example.returncode is None:
                example.kill()
                await example.wait()
    assert example.returncode == 0
    return out.decode().splitlines()


@pytest.mark.parametrize("failed", [0, 2])
async def test_example_goes_on_after_a_failed_unit_and_ends(tmp_path: Path, failed: int) -> None:
    audio = tmp_path / "silence.f32"
    audio.write_bytes(bytes(3 * 64_000))
    lines = await run_example(Sessions(failed), audio)
    expected = ["(listens)"] * 8
    expected[failed] = "UNIT_TOO_LONG"
    assert [line.split()[1] for line in lines] == expected


async def test_short_question_is_followed_by_silence_in_whole_units(tmp_path: Path) -> None:
    question = pcm(8_000)
    audio = tmp_path / "question.f32"
    audio.write_bytes(question)
    sessions = Sessions(failed=-1)
    assert len(await run_example(sessions, audio)) == 6
    sent = b"".join(unit.audio for unit in sessions.units)
    assert {len(unit.audio) for unit in sessions.units} == {64_000}
    assert sent.startswith(question)
    assert not any(sent[len(question) :])
