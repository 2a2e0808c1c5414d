"""An OTLP receiver that takes the place of a collector of metrics in tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics


class MetricReceiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Stores what it receives."""

    def __init__(self) -> None:
        self.address = ""
        self.received: asyncio.Queue[ResourceMetrics] = asyncio.Queue()

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(cls) -> AsyncGenerator[MetricReceiver]:
        receiver, server = cls(), grpc.aio.server()
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(receiver, server)
        receiver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield receiver
        finally:
            await server.stop(1)

    async def Export(self, request, context):
        for exported in request.resource_metrics:
            self.received.put_nowait(exported)
        return metrics_service_pb2.ExportMetricsServiceResponse()

    async def next_export(self) -> tuple[str, dict[str, Metric]]:
        """Return the service name and the metrics by name of the next export."""
        async with asyncio.timeout(10.0):
            exported = await self.received.get()
        attributes = {each.key: each.value.string_value for each in exported.resource.attributes}
        (scope,) = exported.scope_metrics
        return attributes["service.name"], {metric.name: metric for metric in scope.metrics}
