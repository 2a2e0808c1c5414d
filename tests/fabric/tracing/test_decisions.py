"""Traces and events tell why the model listened or spoke in each unit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.edge.live_edge import end, receive, send
from support.fabric.traced_fabric import append, attributes, begin_session, traced_fabric
from support.worker.scripted_model import answer_loud

from duplane.fabric.monitoring import spans
from duplane.worker.models.types import Unit, UnitOutput

DECISIONS = (spans.UNIT_IS_FORCED, spans.UNIT_IS_INTERRUPTION, spans.UNIT_LISTEN_PROBABILITY)


def answer(unit: Unit, length: int) -> UnitOutput:
    """Return an output that tells how likely listening was, unless the unit had to listen."""
    output = answer_loud(unit, length)
    probability = 0.875 if output.is_listen else 0.125
    return replace(
        output,
        interrupted_turn=output.is_forced,
        listen_probability=None if output.is_forced else probability,
    )


async def test_trace_and_client_are_told_why_the_model_listened() -> None:
    told: list[dict[str, Any]] = []
    async with traced_fabric() as fabric:
        fabric.model.answer = answer
        async with fabric.connect() as client:
            await begin_session(client)
            for event in (append(0.0), append(0.5), append(0.5) | {"force_listen": True}):
                await send(client, event)
                told.append(await receive(client))
            await end(client)
        found = await fabric.ended(1)
    assert [event.get("metrics") for event in told] == [
        {"listen_probability": 0.875},
        {"listen_probability": 0.125},
        None,
    ]
    assert [event.get("interrupted") for event in told] == [None, None, True]
    for name in (spans.EDGE_UNIT, spans.WORKER_UNIT):
        units = [attributes(span) for span in found if span.name == name]
        units.sort(key=lambda unit: unit[spans.UNIT_SEQUENCE])
        decisions = [{key: unit[key] for key in DECISIONS if key in unit} for unit in units]
        assert decisions == [
            {spans.UNIT_LISTEN_PROBABILITY: 0.875},
            {spans.UNIT_LISTEN_PROBABILITY: 0.125},
            {spans.UNIT_IS_FORCED: True, spans.UNIT_IS_INTERRUPTION: True},
        ]
