"""A unit that is slow in one stage: `duplane trace` and the metrics name this stage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pybase64
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from support.edge.live_edge import end, receive, send
from support.fabric.traced_fabric import (
    TracedFabric,
    append,
    begin_session,
    set_deadline,
    traced_fabric,
)
from support.monitoring.metrics import logged_url, scrape
from support.protocols.transcripts import picture_of
from websockets.asyncio.client import ClientConnection

from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.runner import SessionRunner
from duplane.edge.spans import SessionSpans
from duplane.edge.transport.websocket import WebSocket
from duplane.fabric.converse import ConverseStream
from duplane.tools.trace.units import Collected
from duplane.tools.trace.views import Choice, report
from duplane.worker.engine.device_thread import DeviceThread
from duplane.worker.engine.events import AnsweredUnit
from duplane.worker.session.duplex_call import DuplexCall
from duplane.worker.session.unit_spans import UnitSpans

pytestmark = pytest.mark.timing

DELAY_S, DEADLINE_NS = 1.0, 800_000_000
PICTURE = pybase64.b64encode(picture_of("jpeg", "8x8") or b"").decode()
Step = Callable[[TracedFabric, ClientConnection, pytest.MonkeyPatch], Awaitable[None]]


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    for spans_class in (SessionSpans, UnitSpans):
        set_deadline(monkeypatch, spans_class, DEADLINE_NS)


async def exchange(client: ClientConnection, value: float = 0.5) -> None:
    await send(client, append(value))
    await receive(client)


def report_of(fabric: TracedFabric) -> str:
    collected = Collected(1000)
    scopes = [ScopeSpans(spans=fabric.receiver.spans)]
    collected.add(ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=scopes)]))
    return report(collected, Choice())


# --- functions that make one stage of a session's last unit slow ---


def in_the_model(stage: str) -> Step:
    async def make_slow(fabric: TracedFabric, client: ClientConnection, _: object) -> None:
        fabric.model.stage_s[stage] = DELAY_S
        await exchange(client)
        fabric.model.stage_s[stage] = 0.0

    return make_slow


async def in_settle(fabric: TracedFabric, client: ClientConnection, _: object) -> None:
    fabric.model.stage_s["settle"] = DELAY_S
    await exchange(client)
    fabric.model.stage_s["settle"] = 0.0
    await exchange(client)


async def without_a_stage(
    fabric: TracedFabric, client: ClientConnection, patch: pytest.MonkeyPatch
) -> None:
    answer = fabric.model.answer

    def answer_late(*arguments: Any) -> Any:
        time.sleep(DELAY_S)
        return answer(*arguments)

    patch.setattr(fabric.model, "answer", answer_late)
    await exchange(client)


async def behind_its_own_units(fabric: TracedFabric, client: ClientConnection, _: object) -> None:
    fabric.model.hold()
    await send(client, append(0.5))
    await fabric.model.held()
    await send(client, append(0.5))
    await asyncio.sleep(DELAY_S)  # the second unit waits for this time
    fabric.model.let_go()
    await receive(client)
    await receive(client)


async def behind_another_conversation(
    fabric: TracedFabric, client: ClientConnection, _: object
) -> None:
    async with fabric.connect() as other:
        await begin_session(other)
        fabric.model.hold()
        await send(other, append(0.5))
        await fabric.model.held()
        await send(client, append(0.5))
        await asyncio.sleep(DELAY_S)  # both units are late, but only the first one runs
        fabric.model.let_go()
        await receive(client)
        await receive(other)
        await end(other)


async def in_its_pictures(
    fabric: TracedFabric, client: ClientConnection, patch: pytest.MonkeyPatch
) -> None:
    prepare = fabric.model.unit

    def prepare_late(unit: Any) -> Any:
        time.sleep(DELAY_S)
        return prepare(unit)

    patch.setattr(fabric.model, "unit", prepare_late)
    await send(client, append(0.5) | {"video_frames": [PICTURE]})
    await receive(client)


async def after_the_device(
    fabric: TracedFabric, client: ClientConnection, patch: pytest.MonkeyPatch
) -> None:
    call, loop = DeviceThread._call, asyncio.get_running_loop()

    def call_late(thread: DeviceThread, function: Any, *arguments: Any) -> None:
        if arguments and isinstance(arguments[-1], AnsweredUnit):
            function = partial(loop.call_later, DELAY_S, function)
        call(thread, function, *arguments)

    patch.setattr(DeviceThread, "_call", call_late)
    await exchange(client)


def late_call(owner: type, name: str, *, is_async: bool = True) -> Step:
    """Return a function that delays one call of a method."""

    async def make_slow(_: object, client: ClientConnection, patch: pytest.MonkeyPatch) -> None:
        called = getattr(owner, name)
        calls: list[None] = []

        async def call_later(*arguments: Any) -> Any:
            if not calls:
                calls.append(None)
                await asyncio.sleep(DELAY_S)
            return await called(*arguments)

        def call_late(*arguments: Any) -> Any:
            if not calls:
                calls.append(None)
                time.sleep(DELAY_S)
            return called(*arguments)

        patch.setattr(owner, name, call_later if is_async else call_late)
        await exchange(client)
        await exchange(client)  # a call that waits already is not delayed, but the next call is

    return make_slow


async def in_the_socket(_: object, client: ClientConnection, patch: pytest.MonkeyPatch) -> None:
    """Make the connection accept no data for a while, as if the client did not read."""
    write, calls = WebSocket.send, list[None]()

    def write_to_full(socket: WebSocket, *arguments: Any) -> None:
        if not calls:
            calls.append(None)
            socket._protocol.pause_writing()
            resume = socket._protocol.resume_writing
            asyncio.get_running_loop().call_later(DELAY_S, resume)
        write(socket, *arguments)

    patch.setattr(WebSocket, "send", write_to_full)
    await exchange(client)


async def in_the_stream(_: object, client: ClientConnection, patch: pytest.MonkeyPatch) -> None:
    """Make the stream accept one unit late, so that the next unit waits."""
    write, calls = ConverseStream.write, list[None]()

    async def write_late(stream: ConverseStream, request: Any) -> None:
        if not calls:
            calls.append(None)
            await asyncio.sleep(DELAY_S)
        await write(stream, request)

    patch.setattr(ConverseStream, "write", write_late)
    await send(client, append(0.5))
    await send(client, append(0.5))
    await receive(client)
    await receive(client)


async def behind_a_slow_message(
    _: object, client: ClientConnection, patch: pytest.MonkeyPatch
) -> None:
    """Make the edge process one message slowly, so that the next message waits."""
    receive_message, calls = SessionRunner.receive, list[None]()

    async def receive_late(runner: Any, *arguments: Any) -> None:
        calls.append(None)
        await receive_message(runner, *arguments)
        if len(calls) == 1:
            await asyncio.sleep(DELAY_S)

    patch.setattr(SessionRunner, "receive", receive_late)
    await send(client, append(0.5))
    await receive(client)
    await exchange(client)


CASES: dict[str, Step] = {
    "edge read": behind_a_slow_message,
    "edge parse": late_call(DuplexSession, "decode", is_async=False),
    "edge queue": in_the_stream,
    "edge send": late_call(ConverseStream, "write"),
    "network there": late_call(DuplexCall, "_receive_unit"),
    "worker prepare": in_its_pictures,
    "worker inbox": behind_its_own_units,
    "worker settle": in_settle,
    "worker device": behind_another_conversation,
    "worker vision": in_the_model("vision"),
    "worker audio": in_the_model("audio"),
    "worker prefill": in_the_model("prefill"),
    "worker decode": in_the_model("decode"),
    "worker talker": in_the_model("talker"),
    "worker vocoder": in_the_model("vocoder"),
    "worker run": without_a_stage,
    "worker deliver": after_the_device,
    "network back": late_call(ConverseStream, "read"),
    "edge render": late_call(DuplexSession, "responded", is_async=False),
    "edge write": in_the_socket,
}
"""For each stage that the report must name: the function that makes it slow."""
# In these cases the previous unit is also late, but in another stage.
TWICE = ("edge queue", "worker device")
SUMS = "duplane_stage_duration_seconds_sum"


@pytest.mark.parametrize("stage", CASES)
async def test_slow_stage_is_named(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    mode = "video" if stage == "worker prepare" else "audio"
    async with traced_fabric(metrics_listen="127.0.0.1:0") as fabric:
        async with fabric.connect(f"mode={mode}") as client:
            await begin_session(client)
            for _ in range(3):
                await exchange(client)
            with pytest.MonkeyPatch.context() as patch:
                await CASES[stage](fabric, client, patch)
            await end(client)
        place, name = stage.split()
        if place == "worker" and name not in ("run", "deliver"):
            scraped = await scrape(logged_url(caplog.records))
            named = "inbox" if name == "inbox" else name
            assert scraped.value(SUMS, stage=named) >= 0.9 * DELAY_S
        await fabric.ended(2 if stage == "worker device" else 1)
        shown = report_of(fabric)
    verdicts = [line for line in shown.splitlines() if ": late, " in line]
    assert verdicts, shown
    assert any(f": late, {stage} " in line for line in verdicts), shown
    if stage not in TWICE:
        assert len(verdicts) == 1 or stage == "worker inbox", shown
