"""Defaults and limits of the specifications, checked with a real worker and a scripted model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import orjson
import pytest
from support.protocols.specifications import duplex_settings
from support.protocols.transcript_replay import IDENTITY
from support.protocols.transcripts import jpeg, json_of
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import Rig, asks, chat_answer, running_worker, unit

from duplane.edge.clock import Moment
from duplane.edge.routing import ENDPOINTS, parse_target
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.fabric.v1 import lease_pb2, registry_pb2, session_pb2
from duplane.worker.models.chat import ChatOutput, ChatRequest, Finish
from duplane.worker.settings import SessionLimits
from pages.events import read

OMNI = lease_pb2.SESSION_KIND_OMNI_DUPLEX
FIRST_EVENTS = {
    "A": ("/v1/realtime?mode=audio", '{"type":"session.update","session":{"instructions":"x"}}'),
    "B": ("/v1/realtime?mode=audio", '{"type":"session.init","payload":{}}'),
    "C": ("/ws/duplex/x", '{"type":"prepare"}'),
}
CHATS = [
    (name, default)
    for name in "BD"
    for default in read(name)["defaults"]
    if '"messages"' in default["event"] and '"video"' not in default["event"]
]


def request_of(path: str, *messages: str) -> session_pb2.Open | session_pb2.ChatRequest:
    """Return the edge's first request to a worker after these messages of a client."""
    entry, now = parse_target(path, {}), Moment(36_077.123, 0)
    session = ENDPOINTS[entry.route, entry.mode].new_session(IDENTITY, Limits(), now)
    session.granted(60.0, now)
    for message in messages:
        told = [orjson.loads(event) for event in session.receive(message.encode(), now)]
        assert not any(event["type"] == "error" for event in told), told
    if isinstance(session, ChatSession):
        turn = session.next_turn(now)
        assert turn
        return turn
    assert isinstance(session, DuplexSession)
    outgoing = session.take(now)
    assert outgoing
    return outgoing.request.open


def with_fields(event: str, fields: dict[str, Any]) -> str:
    """Return a copy of an event in which these fields are also set; the keys are their paths."""
    parsed = json_of(event)
    for path, value in fields.items():
        *outer, last = path.split(".")
        part = parsed
        for key in outer:
            part = part[int(key)] if isinstance(part, list) else part.setdefault(key, {})
        part[last] = value
    return orjson.dumps(parsed).decode()


async def opened_with(rig: Rig, settings: object) -> dict[str, Any]:
    """Open a conversation and return the options that reach the model."""
    assert isinstance(settings, session_pb2.Open)
    async with rig.opened(settings=settings):
        options = asdict(rig.model.options[0])
        await rig.scheduler.until(
            lambda: rig.scheduler.report.slots[0].state != registry_pb2.SLOT_STATE_FREE
        )
    await rig.all_free()
    return {  # the contract uses float32
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in options.items()
    }


@pytest.mark.parametrize("name", FIRST_EVENTS)
async def test_absent_setting_means_its_default_to_the_model(name: str) -> None:
    path, event = FIRST_EVENTS[name]
    at = read(name)["duplex_config"]["at"]
    async with running_worker() as rig:
        bare = await opened_with(rig, request_of(path, event))
        for key, setting in duplex_settings()["settings"].items():
            other = with_fields(event, {f"{at}.{key}": setting["other"]})
            assert await opened_with(rig, request_of(path, other)) != bare, key
            if "default" in setting:
                same = with_fields(event, {f"{at}.{key}": setting["default"]})
                assert await opened_with(rig, request_of(path, same)) == bare, key


async def run_chat(rig: Rig, request: object) -> ChatRequest:
    """Run a chat and return the request that reaches the model."""
    assert isinstance(request, session_pb2.ChatRequest)
    received: list[ChatRequest] = []

    def answer(slot: int, received_request: ChatRequest) -> Iterator[ChatOutput]:
        received.append(received_request)
        yield ChatOutput(slot, 1, text="x", finish=Finish.STOP)

    rig.model.on_chat = answer
    await chat_answer(rig, request)
    await rig.all_free()
    return received[0]


@pytest.mark.parametrize(("name", "default"), CHATS)
async def test_absent_field_of_a_chat_means_its_default_to_the_model(
    name: str, default: dict[str, Any]
) -> None:
    del name
    before, event = default.get("before", ()), default["event"]
    async with running_worker() as rig:
        bare = request_of(default["path"], *before, with_fields(event, {}))
        full = request_of(default["path"], *before, with_fields(event, default["fields"]))
        assert repr(await run_chat(rig, bare)) == repr(await run_chat(rig, full))


def limit(name: str, what: str) -> int:
    return next(entry["value"] for entry in read(name)["limits"] if entry["what"] == what)


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("pictures in one append", lambda count: {"video_frames": [jpeg(1, 1)] * count}),
        (
            "slices of a picture",
            lambda count: {"video_frames": [jpeg(1, 1)], "max_slice_count": count},
        ),
    ],
)
async def test_worker_takes_a_unit_up_to_the_limit(
    what: str, fields: Callable[[int], dict[str, Any]]
) -> None:
    most = limit("A", what)
    async with running_worker() as rig, rig.opened(rig.grant(kind=OMNI)) as client:
        await client.send(unit(0, **fields(most)))
        assert (await client.delta()).sequence == 0
        await client.send(unit(1, **fields(most + 1)))
        assert (await client.failed()).sequence == 1


async def test_worker_takes_a_turn_up_to_the_limit_of_tokens() -> None:
    most = limit("D", "tokens that a turn may ask for")
    async with running_worker() as rig:
        config = session_pb2.ChatConfig(max_new_token_count=most)
        assert (await run_chat(rig, asks(config=config))).options.max_new_tokens == most


async def test_worker_takes_a_context_up_to_the_limit() -> None:
    most = limit("A", "the context, in tokens")
    settings = request_of(*FIRST_EVENTS["A"])
    assert isinstance(settings, session_pb2.Open)
    async with running_worker(ScriptedModel(context_capacity=2 * most)) as rig:
        async with rig.claimed() as client:
            opened = await client.open(settings)
        assert opened.context_token_limit == most


def test_pauses_of_the_worker_are_those_of_the_specification() -> None:
    limits = SessionLimits()
    assert limits.pause_timeout_s == limit("C", "a pause that names no other")
    assert limits.max_pause_s == limit("C", "the longest pause")
