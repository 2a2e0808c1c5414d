"""Lists the functions of the edge on the way of one speaking delta, from the worker to the client.

`make delta-path` runs a session of dialect C against a scripted fabric in one process. It records
each named function of `duplane.edge` that is called after the read of the delta from the worker's
stream, up to and including the function that writes to the client's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvloop
from google.protobuf.duration_pb2 import Duration
from support.edge.live_edge import AUDIO, live_edge, receive, send

from duplane.fabric.v1 import session_pb2

_READ = "ConverseStream.read"
_WRITE = "WebSocket.send"
_WARM_UNIT_COUNT = 3  # spoken before the unit whose delta is recorded
_SAMPLE_COUNT = 24_000


def spoken(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
    """Return the response of a worker that speaks for one second in the middle of a turn."""
    delta = session_pb2.Delta(
        sequence=unit.sequence,
        speech=session_pb2.Speech(
            text="Hello", audio=bytes(4 * _SAMPLE_COUNT), sample_count=_SAMPLE_COUNT
        ),
        context_token_count=100 + unit.sequence,
        token_ids=[1, 2, 3],
        token_counts=session_pb2.TokenCounts(
            output_text_token_count=5, output_audio_token_count=25
        ),
        stage_times=session_pb2.StageTimes(total=Duration(nanos=200_000_000)),
        state_change=session_pb2.StateChange(),
    )
    return [session_pb2.ConverseResponse(delta=delta)]


@contextlib.contextmanager
def _recording(names: dict[str, None]) -> Iterator[None]:
    """Add to `names` the functions that are called from the read of a delta to its write."""
    is_recording = False

    def follow(frame: FrameType, kind: str, argument: Any) -> None:
        nonlocal is_recording
        name = frame.f_code.co_qualname
        if kind == "return" and name == _READ:
            is_recording |= isinstance(argument, session_pb2.ConverseResponse)
        elif kind == "call" and is_recording:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("duplane.edge.") and "<" not in frame.f_code.co_name:
                names[f"{module.removeprefix('duplane.edge.')}:{name}"] = None
        elif kind == "return" and name == _WRITE:
            is_recording = False

    sys.setprofile(follow)
    try:
        yield
    finally:
        sys.setprofile(None)


async def delta_path() -> list[str]:
    """Return the functions, in the order of their first calls."""
    names: dict[str, None] = {}
    async with (
        live_edge(continuity="worker") as edge,
        edge.connect_to("/ws/duplex/adx_1") as client,
    ):
        edge.fabric.model_digest = "m"
        edge.fabric.on_unit = spoken
        for event in ({"type": "queue_done"}, {"type": "prepared"}):
            if event["type"] == "prepared":
                await send(client, {"type": "prepare"})
            assert (await receive(client))["type"] == event["type"]
        for number in range(_WARM_UNIT_COUNT + 1):
            with _recording(names) if number == _WARM_UNIT_COUNT else contextlib.nullcontext():
                await send(client, {"type": "audio_chunk", "audio_base64": AUDIO})
                assert not (await receive(client))["is_listen"]
    return list(names)


def main() -> None:
    """Print the functions and their number."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        names = runner.run(delta_path())
    print(*names, f"{len(names)} functions", sep="\n")


if __name__ == "__main__":
    main()
