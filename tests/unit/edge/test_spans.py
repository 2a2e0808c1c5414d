"""The spans of a session. A session that fails exports its spans even if it is not sampled."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import StatusCode

from duplane.edge.clock import Moment, Timer
from duplane.edge.session.receipt import Receipt
from duplane.edge.spans import SessionSpans
from duplane.fabric.model import ModelFormat
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import session_pb2, trace_pb2

TRACE_ID, PARENT_ID = "1" * 32, "2" * 16
CLIENT = trace_pb2.TraceContext(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")
STEPS = [spans.EDGE_QUEUE, spans.EDGE_CLAIM, spans.EDGE_OPEN]


class CountingClock:
    """Each reading is a nanosecond later."""

    def __init__(self) -> None:
        self.now_ns = 0

    def now(self) -> Moment:
        self.now_ns += 1
        return Moment(0.0, self.now_ns)

    def call_at(self, monotonic_s: float, callback: object) -> Timer:
        raise NotImplementedError


def run_session(sampler: Sampler, *, is_failure: bool) -> dict[str, ReadableSpan]:
    """Run a session up to its opening; return the exported spans, with their names as keys."""
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exporter), sampler)
    session = SessionSpans(telemetry, "sess_1", CountingClock(), CLIENT)
    session.begin(spans.EDGE_QUEUE)
    session.granted("lease_1")
    session.begin(spans.EDGE_OPEN)
    session.end("A", "failed", is_failure=is_failure)
    found = exporter.get_finished_spans()
    assert len({span.name for span in found}) == len(found), "each span is exported once"
    return {span.name: span for span in found}


def test_failed_session_that_is_not_sampled_has_all_its_spans() -> None:
    found = run_session(ALWAYS_OFF, is_failure=True)
    assert found.keys() == {spans.EDGE_SESSION, *STEPS}
    session = found[spans.EDGE_SESSION]
    assert session.status.status_code is StatusCode.ERROR
    assert session.context
    assert session.parent
    assert f"{session.context.trace_id:032x}" == TRACE_ID
    assert f"{session.parent.span_id:016x}" == PARENT_ID
    assert session.attributes == {
        spans.SESSION_ID: "sess_1",
        spans.LEASE_ID: "lease_1",
        spans.DIALECT: "A",
        spans.ERROR_TYPE: "failed",
    }
    times: list[int | None] = [session.start_time]
    for name in STEPS:
        step = found[name]
        assert step.context
        assert step.parent
        assert step.context.trace_id == session.context.trace_id
        assert step.parent.span_id == session.context.span_id
        times += [step.start_time, step.end_time]
    times.append(session.end_time)
    assert times == sorted(times, key=lambda at: at or 0)
    assert len(set(times)) == len(times)


def test_session_that_is_not_sampled_and_does_not_fail_has_no_spans() -> None:
    assert run_session(ALWAYS_OFF, is_failure=False) == {}


def test_failed_session_that_is_sampled_is_exported_once() -> None:
    found = run_session(ALWAYS_ON, is_failure=True)
    assert found.keys() == {spans.EDGE_SESSION, *STEPS}


def test_unit_is_late_after_the_duration_of_its_model() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exporter), ALWAYS_OFF)
    clock = CountingClock()
    session = SessionSpans(telemetry, "sess_1", clock)
    session.use_model(ModelFormat(unit_ns=80_000_000))
    for sequence, taken_ns in enumerate((70_000_000, 90_000_000)):
        received = clock.now()
        unit = session_pb2.Unit(sequence=sequence)
        session.sending(unit, Receipt.at(received))
        clock.now_ns += taken_ns
        written = session.answered(session_pb2.Delta(sequence=sequence), clock.now().wall_ns)
        assert written
        written()
    (late,) = exporter.get_finished_spans()
    assert late.attributes
    assert late.attributes[spans.UNIT_SEQUENCE] == 1
    assert late.attributes[spans.UNIT_IS_LATE]
