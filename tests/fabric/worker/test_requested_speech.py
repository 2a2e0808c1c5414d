"""Callers ask a real worker with a scripted model to speak a text, over gRPC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.monitoring.metrics import logged_url, scrape
from support.worker.rebuild_messages import past, rebuild, rebuilt
from support.worker.scripted_model import ScriptedModel, answer_loud
from support.worker.worker_harness import Client, running_worker, unit

from duplane.fabric.bounds import MAX_SPEECH_REQUESTS, MAX_SPEECH_TEXT_BYTES
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.types import MAX_SPEECH_REQUESTS as MODEL_REQUESTS
from duplane.worker.models.types import UnitFailure

SEEDED = session_pb2.Open(seed=3)
SPOKEN = session_pb2.SPEECH_OUTCOME_SPOKEN
INTERRUPTED = session_pb2.SPEECH_OUTCOME_INTERRUPTED
REFUSED = session_pb2.SPEECH_OUTCOME_REFUSED


def asks(sequence: int, *texts: str, **fields: Any) -> session_pb2.Unit:
    """Return a silent unit with requests, numbered from 10 * `sequence`."""
    requests = [
        session_pb2.SpeechRequest(number=10 * sequence + at, text=text)
        for at, text in enumerate(texts)
    ]
    return unit(sequence, speech_requests=requests, **fields)


def ends(delta: session_pb2.Delta | session_pb2.Failed) -> list[tuple[int, Any]]:
    return [(end.number, end.outcome) for end in delta.speech_results]


def refusals(delta: session_pb2.Delta | session_pb2.Failed) -> list[tuple[int, str, str]]:
    refused = [end for end in delta.speech_results if end.outcome == REFUSED]
    return [(end.number, end.reason, end.field) for end in refused]


async def send(client: Client, *units: session_pb2.Unit) -> None:
    for each in units:
        await client.send(each)


async def test_a_text_is_spoken_from_the_first_unit_on() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await send(client, asks(0, "one two"), unit(1), unit(2))
        first, second, third = [await client.delta() for _ in range(3)]
    assert [delta.speech.text for delta in (first, second)] == ["one ", "two "]
    assert (first.speech_request, ends(first), first.end_of_turn) == (0, [], False)
    assert (second.speech_request, ends(second), second.end_of_turn) == (0, [(0, SPOKEN)], True)
    assert not third.HasField("speech_request")
    assert third.HasField("listen")


async def test_a_forced_listen_ends_the_text() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await send(client, asks(0, "one two", "three"), asks(1, "four", force_listen=True), unit(2))
        _, second, third = [await client.delta() for _ in range(3)]
    assert second.HasField("listen")
    assert ends(second) == [(0, INTERRUPTED), (1, INTERRUPTED)]
    assert (third.speech.text, ends(third)) == ("four ", [(10, SPOKEN)])


@pytest.mark.parametrize("count", [1, 2])
async def test_another_worker_speaks_the_rest(count: int) -> None:
    async with running_worker() as rig:
        async with rig.opened(settings=SEEDED) as client:
            await send(client, asks(0, "one two three", "four"), unit(1))
            deltas = [await client.delta() for _ in range(2)][:count]
        await rig.all_free()
        async with rig.opened(settings=SEEDED) as client:
            await client.write(
                rebuild(
                    *(
                        past(n, token_ids=delta.token_ids, rebuild_state=delta.rebuild_state)
                        for n, delta in enumerate(deltas)
                    )
                )
            )
            await rebuilt(client)
            await send(client, *(unit(n) for n in range(count, 4)))
            later = [await client.delta() for _ in range(count, 4)]
    assert [delta.speech.text for delta in later] == ["two ", "three ", "four "][count - 1 :]
    assert [end for delta in later for end in ends(delta)] == [(0, SPOKEN), (1, SPOKEN)]


async def test_a_refused_request_does_not_affect_its_unit() -> None:
    texts = ("", "x" * (MAX_SPEECH_TEXT_BYTES + 1), "one", " \t")
    async with running_worker() as rig, rig.opened() as client:
        await send(client, asks(0, *texts), unit(1))
        first, second = [await client.delta() for _ in range(2)]
    assert first.speech.text == "one "
    field = "speech_requests[{}].text"
    assert refusals(first) == [(at, "INVALID_FIELD", field.format(at)) for at in (0, 1, 3)]
    assert all(end.message.startswith(end.field) for end in first.speech_results)
    assert second.HasField("listen")


async def test_too_many_requests_are_refused_by_name() -> None:
    assert MODEL_REQUESTS == MAX_SPEECH_REQUESTS
    texts = ["one two"] * (MAX_SPEECH_REQUESTS + 1)
    async with running_worker() as rig, rig.opened() as client:
        await send(client, asks(0, *texts), asks(1, "three"))
        first, second = [await client.delta() for _ in range(2)]
    field = "speech_requests"
    assert refusals(first) == [(MAX_SPEECH_REQUESTS, "TOO_MANY_REQUESTS", field)]
    assert refusals(second) == [(10, "TOO_MANY_REQUESTS", field)]


async def test_a_flood_of_requests_is_bounded_and_the_neighbour_goes_on() -> None:
    async with (
        running_worker() as rig,
        rig.opened(rig.grant(0)) as client,
        rig.opened(rig.grant(1)) as neighbour,
    ):
        await client.send(asks(0, *["one"] * 100_000))
        await neighbour.send(unit(0, 0.5))
        assert (await neighbour.delta()).speech.text
        delta = await client.delta()
        assert delta.speech.text == "one "
        assert 0 < len(refusals(delta)) <= 64


async def test_a_model_that_cannot_refuses_by_name() -> None:
    model = ScriptedModel()
    model.constants = replace(model.constants, accepts_speech_requests=False)
    async with running_worker(model) as rig, rig.opened() as client:
        await send(client, asks(0, "one"), unit(1, 0.5))
        first, second = [await client.delta() for _ in range(2)]
    assert first.HasField("listen")
    assert refusals(first) == [(0, "UNSUPPORTED", "speech_requests[0]")]
    assert second.speech.text


async def test_requests_of_dropped_units_are_spoken() -> None:
    async with running_worker() as rig, rig.opened() as client:
        rig.model.hold()
        await send(client, unit(0))
        await rig.model.held()
        await send(client, *(asks(n, f"text{n}") for n in range(1, 8)))
        await rig.received(8)
        rig.model.let_go()
        deltas = [await client.delta() for _ in range(5)]
        await send(client, *(unit(n) for n in range(8, 11)))
        deltas += [await client.delta() for _ in range(3)]
    assert [delta.speech.text for delta in deltas] == ["", *(f"text{n} " for n in range(1, 8))]


async def test_a_failed_unit_ends_its_requests_and_those_of_dropped_units() -> None:
    async with running_worker() as rig, rig.opened() as client:
        rig.model.answer = lambda unit, length: (
            UnitFailure(unit.slot, "AUDIO_INVALID", "no", is_fatal=False)
            if unit.sequence == 3
            else answer_loud(unit, length)
        )
        rig.model.hold()
        await send(client, unit(0))
        await rig.model.held()
        forced = asks(2, "two", force_listen=True)
        await send(client, asks(1, "one"), forced, *(asks(n, f"text{n}") for n in range(3, 7)))
        await rig.received(7)
        rig.model.let_go()
        await client.delta()
        failed = await client.failed()
        deltas = [await client.delta() for _ in range(3)]
    assert failed.sequence == 3
    assert ends(failed) == [(10, INTERRUPTED), (20, REFUSED), (30, REFUSED)]
    assert refusals(failed) == [(n, "AUDIO_INVALID", "audio") for n in (20, 30)]
    assert [delta.speech.text for delta in deltas] == ["text4 ", "text5 ", "text6 "]


@pytest.mark.timing
async def test_ends_of_requests_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_worker(metrics_listen="127.0.0.1:0") as rig, rig.opened() as client:
        units = asks(0, "one"), asks(1, "two three", ""), unit(2, force_listen=True)
        await send(client, *units)
        for _ in units:
            await client.delta()
        seen = await scrape(logged_url(caplog.records))
    for outcome in ("spoken", "interrupted", "refused"):
        assert seen.value("duplane_speech_requests_total", outcome=outcome) == 1
