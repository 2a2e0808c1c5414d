"""A receiver for the spans and metrics of a fabric, so that a run can include their export."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Generator, Mapping

import grpc.aio

_SERVICES = ("trace.v1.TraceService", "metrics.v1.MetricsService")


class Receiver:
    """Receives OTLP exports, counts their bytes, and discards them."""

    def __init__(self) -> None:
        self.byte_count = 0

    async def _export(self, request: bytes, _: object) -> bytes:
        self.byte_count += len(request)
        return b""  # an answer without fields: all was accepted

    @classmethod
    @contextlib.asynccontextmanager
    async def exporting(cls) -> AsyncGenerator[Receiver]:
        """Serve, and set the environment so that new processes export to this receiver."""
        receiver, server = cls(), grpc.aio.server()
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
            receiver._export
        )
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    f"opentelemetry.proto.collector.{name}", {"Export": handler}
                )
                for name in _SERVICES
            ]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with _environment(
                {
                    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                    "OTEL_EXPORTER_OTLP_INSECURE": "true",
                }
            ):
                yield receiver
        finally:
            await server.stop(None)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
