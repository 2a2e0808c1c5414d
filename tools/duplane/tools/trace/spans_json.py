"""Converts received spans to lines of JSON and back: the OTLP file format, one request per line."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from duplane.tools.command import UsageError

_MAX_LINE_BYTES = 16 * 1024 * 1024  # longest line of a file; the largest request has 4 MB
_IDS = ("traceId", "spanId", "parentSpanId")


def to_line(request: ExportTraceServiceRequest) -> bytes:
    """Return a request as one line."""
    found = MessageToDict(request, use_integers_for_enums=True)
    _convert_ids(found, lambda text: base64.b64decode(text).hex())
    return orjson.dumps(found) + b"\n"


def read_lines(file: Path) -> Iterator[ExportTraceServiceRequest]:
    """Yield the requests of a file. Raises UsageError naming the invalid line."""
    with file.open("rb") as lines:
        for number in range(1, 1 << 62):
            line = lines.readline(_MAX_LINE_BYTES)
            if not line:
                return
            try:
                yield _from_line(line)
            except (ValueError, TypeError, AttributeError, ParseError) as error:
                raise UsageError(f"{file}: line {number} has no spans: {error}") from None


def _from_line(line: bytes) -> ExportTraceServiceRequest:
    found = orjson.loads(line)
    _convert_ids(found, lambda text: base64.b64encode(bytes.fromhex(text)).decode())
    return ParseDict(found, ExportTraceServiceRequest(), ignore_unknown_fields=True)


def _convert_ids(request: dict[str, Any], convert: Callable[[str], str]) -> None:
    """Convert the ids in place: they are hexadecimal in OTLP, and base64 in protobuf's JSON."""
    for resource in request.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                for owner in (span, *span.get("links", ())):
                    owner.update({name: convert(owner[name]) for name in _IDS if name in owner})
