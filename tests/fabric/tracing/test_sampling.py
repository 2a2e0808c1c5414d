"""Late, failed and dropped units are exported, whatever the sampler chooses.

If the sampler chooses no session, no other units are exported.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from support.edge.live_edge import UPDATE, end, receive, send
from support.fabric.traced_fabric import (
    TracedFabric,
    append,
    attributes,
    begin_session,
    set_deadline,
    traced_fabric,
)

from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.fabric.monitoring import spans
from duplane.worker.models.types import Unit, UnitFailure
from duplane.worker.session.unit_spans import UnitSpans

SLOW_S, DEADLINE_NS = 0.5, 400_000_000


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    for spans_class in (SessionSpans, UnitSpans):
        set_deadline(monkeypatch, spans_class, DEADLINE_NS)


async def until_exported(fabric: TracedFabric, *names: str) -> list[Span]:
    """Wait until spans with these names have arrived; return all received spans."""
    await fabric.receiver.until(lambda found: set(names) <= {span.name for span in found})
    return list(await fabric.flushed())


async def test_late_unit_is_exported_by_edge_and_worker_and_no_other() -> None:
    async with traced_fabric(sampler=ALWAYS_OFF) as fabric:
        async with fabric.connect() as client:
            await begin_session(client)
            for number in range(6):
                fabric.model.stage_s["decode"] = SLOW_S if number == 3 else 0.0
                await send(client, append(0.5))
                await receive(client)
            await end(client)
        found = await until_exported(fabric, *(spans.EDGE_UNIT, spans.WORKER_UNIT))
    edge, worker = sorted(found, key=lambda span: span.name)
    assert (edge.name, worker.name) == (spans.EDGE_UNIT, spans.WORKER_UNIT)
    assert edge.trace_id == worker.trace_id
    assert worker.parent_span_id == edge.span_id
    for span in (edge, worker):
        assert attributes(span)[spans.UNIT_SEQUENCE] == 3
        assert attributes(span)[spans.UNIT_IS_LATE] is True


async def test_edge_follows_the_worker_that_takes_a_unit_for_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_deadline(monkeypatch, SessionSpans, 3_600_000_000_000)
    async with traced_fabric(sampler=ALWAYS_OFF) as fabric:
        fabric.model.stage_s["decode"] = SLOW_S
        async with fabric.connect() as client:
            await begin_session(client)
            await send(client, append(0.5))
            await receive(client)
            await end(client)
        found = await until_exported(fabric, *(spans.EDGE_UNIT, spans.WORKER_UNIT))
    assert len({span.trace_id for span in found}) == 1


async def test_unit_that_is_late_after_the_worker_has_the_stages_of_its_delta(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_deadline(monkeypatch, SessionSpans, 0)
    async with traced_fabric(sampler=ALWAYS_OFF) as fabric:
        fabric.model.stage_s["decode"] = 0.01
        async with fabric.connect() as client:
            await begin_session(client)
            await send(client, append(0.5))
            await receive(client)
            await end(client)
        (edge,) = await until_exported(fabric, spans.EDGE_UNIT)
    assert attributes(edge)[f"{spans.STAGE_PREFIX}decode_ms"] >= 10


async def test_failed_unit_is_exported_by_edge_and_worker() -> None:
    async with traced_fabric(sampler=ALWAYS_OFF) as fabric:
        answer = fabric.model.answer

        def fail(unit: Unit, length: int) -> object:
            if unit.sequence == 1:
                return UnitFailure(unit.slot, "AUDIO_INVALID", "no sound", False)
            return answer(unit, length)

        fabric.model.answer = fail  # type: ignore[assignment] - the test replaces a method
        async with fabric.connect() as client:
            await begin_session(client)
            for _ in range(3):
                await send(client, append(0.5))
                await receive(client)
            await end(client)
        found = await until_exported(fabric, *(spans.EDGE_UNIT, spans.WORKER_UNIT))
    by_name = {span.name: span for span in found}
    edge, worker = by_name[spans.EDGE_UNIT], by_name[spans.WORKER_UNIT]
    assert len(found) == 2
    assert edge.trace_id == worker.trace_id
    for span in (edge, worker):
        assert attributes(span)[spans.UNIT_SEQUENCE] == 1
        assert attributes(span)[spans.UNIT_OUTCOME] == "failed"
        assert span.status.code == span.status.STATUS_CODE_ERROR
    assert attributes(worker)[spans.ERROR_TYPE] == "AUDIO_INVALID"
    assert [event.name for event in worker.events][-2:] == [spans.RUN, spans.DELIVER]


async def test_units_dropped_by_the_worker_are_exported_by_edge_and_worker() -> None:
    async with traced_fabric(sampler=ALWAYS_OFF) as fabric:
        async with fabric.connect() as client:
            await begin_session(client)
            fabric.model.hold()
            await send(client, append(0.5))
            await fabric.model.held()
            for _ in range(6):  # the inbox has room for four
                await send(client, append(0.5))
            await dropped_by(fabric, 2)
            fabric.model.let_go()
            for _ in range(5):
                await receive(client)
            await end(client)
        await fabric.receiver.until(lambda found: sum(map(is_dropped, found)) >= 4)
        found = [span for span in await fabric.flushed() if is_dropped(span)]
    halves = {(span.name, attributes(span)[spans.UNIT_SEQUENCE]) for span in found}
    assert halves == {
        (name, number) for name in (spans.EDGE_UNIT, spans.WORKER_UNIT) for number in (1, 2)
    }
    assert len({span.trace_id for span in found}) == 2
    for span in found:
        if span.name == spans.WORKER_UNIT:
            assert [event.name for event in span.events] == [spans.PREPARE, spans.INBOX]


def is_dropped(span: Span) -> bool:
    return attributes(span).get(spans.UNIT_OUTCOME) == "dropped"


async def dropped_by(fabric: TracedFabric, count: int) -> None:
    """Wait until the worker has exported this number of dropped units."""

    def is_enough(found: object) -> bool:
        names = [span.name for span in fabric.receiver.spans if is_dropped(span)]
        return names.count(spans.WORKER_UNIT) >= count

    await fabric.receiver.until(is_enough)


async def test_unit_that_the_edge_drops_is_exported() -> None:
    limits = replace(Limits(), early_unit_count=2)
    async with traced_fabric(slot_count=1, sampler=ALWAYS_OFF, limits=limits) as fabric:
        async with fabric.connect() as holder:
            await begin_session(holder)
            async with fabric.connect() as client:
                assert (await receive(client))["type"] == "session.queued"
                await send(client, UPDATE)
                for _ in range(3):
                    await send(client, append(0.5))
                await fabric.receiver.until(lambda found: any(map(is_dropped, found)))
                await end(holder)
        found = [span for span in await fabric.flushed() if is_dropped(span)]
    assert {span.name for span in found} == {spans.EDGE_UNIT}
    assert [event.name for event in found[0].events] == [spans.READ, spans.PARSE, spans.QUEUE]
    assert spans.UNIT_SEQUENCE not in attributes(found[0])
