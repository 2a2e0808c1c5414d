"""`duplane trace` without processes: the file of spans, the bound of units, tables and verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from duplane.fabric.monitoring import spans
from duplane.tools.command import UsageError
from duplane.tools.trace.spans_json import read_lines, to_line
from duplane.tools.trace.units import Collected
from duplane.tools.trace.views import Choice, report

MS = 1_000_000
START = 1_714_200_000_000 * MS


def request(*found: Span) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=found)])]
    )


def pairs(**attributes: Any) -> list[KeyValue]:
    kinds = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
    return [
        KeyValue(key=key.replace("__", "."), value=AnyValue(**{kinds[type(value)]: value}))
        for key, value in attributes.items()
    ]


def span(
    name: str, trace: int, stages: dict[str, int], start_ms: int = 0, **attributes: Any
) -> Span:
    """Return a span whose stages take these milliseconds."""
    made = Span(
        name=name,
        trace_id=trace.to_bytes(16, "big"),
        span_id=(1000 + trace).to_bytes(8, "big"),
        start_time_unix_nano=START + start_ms * MS,
        attributes=pairs(**attributes),
        links=[Span.Link(trace_id=b"t" * 16, span_id=b"s" * 8)],
    )
    at_ns = made.start_time_unix_nano
    for stage, lasted_ms in stages.items():
        made.events.add(name=stage, time_unix_nano=at_ns)
        at_ns += lasted_ms * MS
    made.end_time_unix_nano = at_ns
    return made


def unit(
    number: int, decode_ms: int = 5, *, session: str = "s1", is_late: bool = False
) -> list[Span]:
    """Return the spans of one unit, which takes 6 ms and `decode_ms`."""
    more = {"duplane__unit__is_late": True} if is_late else {}
    common: dict[str, Any] = {
        "session__id": session,
        "duplane__unit__sequence": number,
        "duplane__unit__outcome": "speech",
        **more,
    }
    edge = {
        "read": 1,
        "parse": 1,
        "queue": 0,
        "send": 0,
        "worker": 3 + decode_ms,
        "render": 1,
        "write": 0,
    }
    worker = {"inbox": 0, "audio": 1, "decode": decode_ms, "deliver": 0}
    trace = number + 1 + 100 * ord(session[-1])
    return [
        span(spans.EDGE_UNIT, trace, edge, **common),
        span(spans.WORKER_UNIT, trace, worker, start_ms=3, **common),
    ]


def collected(*units: list[Span], limit: int = 100) -> Collected:
    kept = Collected(limit)
    for found in units:
        kept.add(request(*found))
    return kept


def test_written_spans_are_read_again(tmp_path: Path) -> None:
    first, second = request(*unit(0)), request(*unit(1))
    line = to_line(first)
    assert (
        f'"traceId":"{first.resource_spans[0].scope_spans[0].spans[0].trace_id.hex()}"'.encode()
        in line
    )
    assert b'"spanId":"' + (b"s" * 8).hex().encode() in line, "ids of links are hexadecimal too"
    file = tmp_path / "spans.jsonl"
    file.write_bytes(line + to_line(second))
    assert list(read_lines(file)) == [first, second]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b'{"resourceSpans": 3}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"zz"}]}]}]}',
    ],
)
def test_line_without_spans_is_refused_by_its_number(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_bytes(to_line(request(*unit(0))) + line + b"\n")
    with pytest.raises(UsageError, match="line 2"):
        list(read_lines(file))


def test_waterfall_tells_why_the_model_listened() -> None:
    why: dict[str, Any] = {
        "session__id": "s1",
        "duplane__unit__sequence": 7,
        "duplane__unit__outcome": "listen",
        "duplane__unit__is_interruption": True,
        "duplane__unit__listen_probability": 0.8125,
    }
    shown = report(collected([span(spans.EDGE_UNIT, 1, {"read": 5}, **why)]), Choice(unit=7))
    assert "listen, 5.0 ms, amid its turn, listen probability 0.8125" in shown
    why |= {"duplane__unit__is_forced": True}
    shown = report(collected([span(spans.EDGE_UNIT, 1, {"read": 5}, **why)]), Choice(unit=7))
    assert "listen, 5.0 ms, had to listen, amid its turn" in shown


def test_waterfall_tells_that_a_text_was_requested() -> None:
    facts: dict[str, Any] = {
        "session__id": "s1",
        "duplane__unit__sequence": 7,
        "duplane__unit__outcome": "speech",
        "duplane__unit__is_requested": True,
    }
    shown = report(collected([span(spans.EDGE_UNIT, 1, {"read": 5}, **facts)]), Choice(unit=7))
    assert "speech, 5.0 ms, spoke a requested text" in shown


def test_waterfall_covers_the_whole_unit_in_order() -> None:
    (one,) = collected(unit(7, 20)).chosen()
    stages = one.stages()
    assert [(stage.place, stage.name) for stage in stages][3:] == [
        ("edge", "send"),
        ("network", "there"),
        *(("worker", name) for name in ("inbox", "audio", "decode", "deliver")),
        ("network", "back"),
        ("edge", "render"),
        ("edge", "write"),
    ]
    assert [stage.begin_ns for stage in stages[1:]] == [stage.end_ns for stage in stages[:-1]]
    assert sum(stage.lasted_ms for stage in stages) == pytest.approx(one.lasted_ms)
    shown = report(collected(unit(7, 20)), Choice(unit=7))
    assert "unit 7 of s1, speech, 26.0 ms" in shown
    (decode,) = [line for line in shown.splitlines() if line.startswith("worker decode")]
    assert "4.00     20.00 ms" in decode
    assert decode.count("#") == 31, "20 of 26 ms, of 40 characters"


def test_late_unit_is_named_with_the_stage_that_took_more_than_usual() -> None:
    kept = collected(*(unit(number, 50) for number in range(9)), unit(9, 1500, is_late=True))
    shown = report(kept, Choice(slowest=2))
    assert "10 units, 1 late" in shown
    (line,) = [line for line in shown.splitlines() if "unit 9: " in line]
    assert line.endswith("s1 unit 9: late, worker decode 1500.0 ms (usually 50.0 ms)")
    assert "unit 9 of s1" in shown, "the stages of the slowest are shown"
    assert "unit 3 of s1" not in shown


def test_late_unit_without_the_workers_half_has_the_stages_of_its_delta() -> None:
    edge, _ = unit(0, 40, is_late=True)
    assert [stage.name for stage in collected([edge]).chosen()[0].stages()][4] == "unknown"
    edge.attributes.extend(pairs(duplane__stage__decode_ms=30.0, duplane__stage__total_ms=34.0))
    (one,) = collected([edge]).chosen()
    assert [(stage.place, stage.name, stage.lasted_ms) for stage in one.stages()][4:7] == [
        ("worker", "decode", 30.0),
        ("worker", "deliver", 4.0),
        ("network", "there, back", 9.0),
    ]


@pytest.mark.parametrize("has_edge", [True, False])
def test_workers_half_without_stages_is_one_unknown_stage(*, has_edge: bool) -> None:
    edge, worker = unit(0)
    worker.ClearField("events")
    kept = collected(unit(1), [edge, worker] if has_edge else [worker])
    (one,) = kept.chosen(sequence=0)
    stages = [stage for stage in one.stages() if stage.place == "worker"]
    assert [(stage.name, stage.lasted_ms) for stage in stages] == [("unknown", 6.0)]
    assert "unit 0 of s1" in report(kept, Choice(unit=0))


def test_units_of_other_sessions_are_left_out() -> None:
    kept = collected(unit(0), unit(0, session="s2"), unit(1, session="s2"))
    assert "2 units" in report(kept, Choice(session="s2"))
    assert "no such unit" in report(kept, Choice(session="s3"))
    assert "no unit" in report(Collected(1), Choice())


def test_oldest_units_are_dropped_above_the_bound() -> None:
    kept = collected(*(unit(number) for number in range(30)), limit=10)
    assert [one.sequence for one in kept.chosen()] == list(range(20, 30))
    assert kept.dropped_unit_count == 20
    assert "20 older units" in report(kept, Choice())
    for number in range(30):
        kept.add(request(span(spans.EDGE_SESSION, number + 1, {}, session__id=f"s{number}")))
    assert len(kept.steps) == 10
    kept.add(request(*(span(spans.EDGE_QUEUE, 1, {}, session__id="chat") for _ in range(100))))
    assert len(kept.steps_of("chat")) == 64
