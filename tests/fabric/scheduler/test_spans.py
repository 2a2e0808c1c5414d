"""The wait in the queue is recorded as a span in the caller's trace."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from support.scheduler.scheduler_harness import SchedulerHarness

from duplane.fabric.errors import Reason
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry


async def test_wait_in_the_queue_is_a_span_until_its_grant_or_its_error() -> None:
    exporter = InMemorySpanExporter()
    tracer = Telemetry("scheduler", SimpleSpanProcessor(exporter))
    session = tracer.start("edge.session")
    trace = spans.inject(session)
    async with SchedulerHarness.running(tracer, ticket_limit=1) as harness:
        waiting = await harness.caller(session_id="s1", trace=trace)
        await waiting.stands(1)
        refused = await (await harness.caller(session_id="s2", trace=trace)).refused()
        assert refused.reason is Reason.QUEUE_FULL
        await harness.worker()
        granted = await waiting.granted()
    queued: dict[object, ReadableSpan] = {
        (one.attributes or {})[spans.SESSION_ID]: one
        for one in exporter.get_finished_spans()
        if one.name == spans.SCHEDULER_QUEUE
    }
    assert set(queued) == {"s1", "s2"}
    for span in queued.values():
        assert span.parent
        assert span.parent.span_id == session.get_span_context().span_id
    served, failed = queued["s1"], queued["s2"]
    assert (served.attributes or {})[spans.LEASE_ID] == granted.lease_id
    assert served.status.status_code is StatusCode.UNSET
    assert (failed.attributes or {})[spans.ERROR_TYPE] == "QUEUE_FULL"
    assert failed.status.status_code is StatusCode.ERROR
    session.end()
