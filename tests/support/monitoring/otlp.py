"""A receiver of OTLP that replaces a collector in tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.time_limits import WITHIN_S


class SpanReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores all received spans, and the service that sent each of them."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Span] = []
        self.services: dict[bytes, str] = {}  # key: the span id
        self._more = asyncio.Condition()

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(cls) -> AsyncGenerator[SpanReceiver]:
        """Serve on a free port of the loopback interface."""
        receiver = cls()
        server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
        receiver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield receiver
        finally:
            await server.stop(1)

    async def Export(self, request, context):
        async with self._more:
            for resource in request.resource_spans:
                attributes = {
                    one.key: one.value.string_value for one in resource.resource.attributes
                }
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
                    names = dict.fromkeys((s.span_id for s in scope.spans), "")
                    self.services |= dict.fromkeys(names, attributes.get("service.name", ""))
            self._more.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(
        self, is_enough: Callable[[Sequence[Span]], bool], within_s: float = WITHIN_S
    ) -> Sequence[Span]:
        """Wait until `is_enough` accepts the spans received so far, and return them."""
        async with asyncio.timeout(within_s), self._more:
            await self._more.wait_for(lambda: is_enough(self.spans))
            return list(self.spans)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]
