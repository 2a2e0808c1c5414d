"""Each unit of each session is one complete trace, from the socket to the device and back."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.edge.live_edge import end, receive, send
from support.fabric.traced_fabric import TracedFabric, append, attributes, traced_fabric

from duplane.fabric.monitoring import spans

SESSIONS, UNITS, SLOTS = 10, 20, 4
MS = 1_000_000
STAGE_S = {"audio": 0.002, "prefill": 0.002, "decode": 0.004, "vocoder": 0.002}


async def run_session(fabric: TracedFabric, values: Sequence[float]) -> None:
    async with fabric.connect() as client:
        while (event := await receive(client))["type"] != "session.queue_done":
            assert event["type"] in ("session.queued", "session.queue_update")
        await send(client, {"type": "session.update", "session": {"instructions": "Be brief."}})
        assert (await receive(client))["type"] == "session.created"
        for value in values:
            await send(client, append(value))
            await receive(client)
        await end(client)


def check_stages(span: Span, order: Sequence[str]) -> list[str]:
    """Check that the stages of a span are in order and have no gaps; return their names."""
    names = [event.name for event in span.events]
    assert names == [stage for stage in order if stage in names]
    times = [event.time_unix_nano for event in span.events]
    assert times[0] == span.start_time_unix_nano
    assert times == sorted(times)
    assert times[-1] <= span.end_time_unix_nano
    return names


async def test_ten_sessions_of_twenty_units_are_whole_traces() -> None:
    async with traced_fabric(SLOTS) as fabric:
        fabric.model.stage_s.update(STAGE_S)
        values = [0.0 if number % 3 else 0.5 for number in range(UNITS)]
        await asyncio.gather(*(run_session(fabric, values) for _ in range(SESSIONS)))
        found = await fabric.ended(SESSIONS)
    by_name: dict[str, list[Span]] = defaultdict(list)
    for span in found:
        by_name[span.name].append(span)
    check_sessions(by_name)
    check_units(by_name)


def check_sessions(by_name: Mapping[str, Sequence[Span]]) -> None:
    """Check that one trace per session contains the spans of edge, scheduler and worker."""
    roots = by_name[spans.EDGE_SESSION]
    assert len(roots) == SESSIONS
    assert len({root.trace_id for root in roots}) == SESSIONS
    assert not any(root.parent_span_id for root in roots)
    by_trace = {root.trace_id: root for root in roots}
    for name in (
        *(spans.EDGE_CLAIM, spans.EDGE_OPEN, spans.EDGE_CLOSE),
        *(spans.SCHEDULER_QUEUE, spans.WORKER_SESSION),
    ):
        assert len(by_name[name]) == SESSIONS, name
        for span in by_name[name]:
            assert span.parent_span_id == by_trace[span.trace_id].span_id
    workers = {span.trace_id: span.span_id for span in by_name[spans.WORKER_SESSION]}
    for name in (spans.WORKER_OPEN, spans.WORKER_CLEANUP):
        assert len(by_name[name]) == SESSIONS, name
        for span in by_name[name]:
            assert span.parent_span_id == workers[span.trace_id]
    assert by_name[spans.EDGE_QUEUE], "some sessions wait: there are fewer slots than sessions"


def check_units(by_name: Mapping[str, Sequence[Span]]) -> None:
    """Check that each unit is one trace of two spans, whose stages have no gaps."""
    sessions = {root.span_id for root in by_name[spans.EDGE_SESSION]}
    edges = {span.trace_id: span for span in by_name[spans.EDGE_UNIT]}
    workers = {span.trace_id: span for span in by_name[spans.WORKER_UNIT]}
    assert len(by_name[spans.EDGE_UNIT]) == len(edges) == SESSIONS * UNITS
    assert len(by_name[spans.WORKER_UNIT]) == len(workers) == SESSIONS * UNITS
    assert edges.keys() == workers.keys()
    for trace_id, edge in edges.items():
        worker = workers[trace_id]
        assert not edge.parent_span_id
        assert worker.parent_span_id == edge.span_id
        (session,) = edge.links
        assert session.span_id in sessions
        (of_session,) = worker.links
        assert of_session.span_id == session.span_id
        assert attributes(worker)["duplane.batch.size"] >= 1
        assert check_stages(edge, spans.EDGE_STAGES) == list(spans.EDGE_STAGES)
        stages = check_stages(worker, spans.WORKER_STAGES)
        assert {"audio", "prefill", "decode", "vocoder", spans.DELIVER} <= set(stages)
        check_the_whole(edge, worker)


def durations(span: Span) -> dict[str, int]:
    """Return the nanoseconds of each stage.

    A stage lasts until the next stage begins, or until the span ends.
    """
    begins = [event.time_unix_nano for event in span.events]
    ends = [*begins[1:], span.end_time_unix_nano]
    names = [event.name for event in span.events]
    return {name: end - begin for name, begin, end in zip(names, begins, ends, strict=True)}


def check_the_whole(edge: Span, worker: Span) -> None:
    """Check that the times of the stages and of the network add up to the time of the unit."""
    begins = {event.name: event.time_unix_nano for event in edge.events}
    # The worker may receive a unit before the edge records that the stream has accepted it.
    sent_ns = min(begins[spans.WORKER], worker.start_time_unix_nano)
    assert sent_ns > begins[spans.SEND]
    there_ns = worker.start_time_unix_nano - sent_ns
    (delivers_ns,) = (one.time_unix_nano for one in worker.events if one.name == spans.DELIVER)
    assert begins[spans.RENDER] > delivers_ns
    # The edge may receive the delta before the worker records that the stream has accepted it.
    received_ns = max(begins[spans.RENDER], worker.end_time_unix_nano)
    back_ns = received_ns - worker.end_time_unix_nano
    of_edge, of_worker = durations(edge), durations(worker)
    of_edge[spans.SEND] = sent_ns - begins[spans.SEND]
    of_edge[spans.RENDER] -= received_ns - begins[spans.RENDER]
    of_edge[spans.WORKER] = there_ns + sum(of_worker.values()) + back_ns
    whole_ns = edge.end_time_unix_nano - edge.start_time_unix_nano
    assert abs(sum(of_edge.values()) - whole_ns) < MS
    for stage, seconds in STAGE_S.items():
        assert of_worker[stage] >= seconds * 1e9
    reported = attributes(worker)
    for name, nanoseconds in of_worker.items():
        assert abs(reported[f"{spans.STAGE_PREFIX}{name}_ms"] * MS - nanoseconds) < MS
