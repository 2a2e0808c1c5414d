"""The spans of units tell which of them spoke a text that a client requested."""

from __future__ import annotations

from support.edge.live_edge import end, receive, send
from support.fabric.traced_fabric import append, attributes, begin_session, traced_fabric

from duplane.fabric.monitoring import spans


async def test_spans_of_units_tell_that_their_text_was_requested() -> None:
    async with traced_fabric() as fabric:
        async with fabric.connect() as client:
            await begin_session(client)
            await send(client, {"type": "speech.request", "text": "one two"})
            texts: list[str] = []
            for _ in range(3):
                await send(client, append(0.0))
                event = await receive(client)
                if event["type"] == "speech.done":
                    event = await receive(client)
                texts.append(event.get("text", ""))
            await end(client)
        found = await fabric.ended(1)
    assert texts == ["one ", "two ", ""]
    for name in (spans.EDGE_UNIT, spans.WORKER_UNIT):
        units = [attributes(span) for span in found if span.name == name]
        units.sort(key=lambda unit: unit[spans.UNIT_SEQUENCE])
        assert [unit.get(spans.UNIT_IS_REQUESTED) for unit in units] == [True, True, None]
