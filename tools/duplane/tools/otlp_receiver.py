"""A receiver of spans: OTLP over gRPC. Its users decide what to do with the exports."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

import grpc.aio

from duplane.fabric.addresses import Address
from duplane.fabric.process import StartError
from duplane.fabric.tls.credentials import FabricCredentials

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_MAX_CALLS = 32  # concurrent calls; exporters repeat calls that are refused


@contextlib.asynccontextmanager
async def receiving_otlp(
    listen: Address,
    on_export: Callable[[bytes], None],
    credentials: FabricCredentials | None = None,
) -> AsyncGenerator[Address]:
    """Receive spans during the body of the `with`; yield the address. Raises StartError.

    `on_export` gets each export as the bytes of its request. An export for which it raises an
    exception is refused. With `credentials`, exporters need a certificate of the fabric.
    """

    async def export(request: bytes, _: object) -> bytes:
        on_export(request)
        return b""  # an answer without fields: all was accepted

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(export)
    server = grpc.aio.server(maximum_concurrent_rpcs=_MAX_CALLS, options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler})]
    )
    try:
        if credentials:
            port = server.add_secure_port(str(listen), credentials.server_credentials())
        else:
            port = server.add_insecure_port(str(listen))
    except RuntimeError:
        raise StartError(f"cannot listen on {listen}") from None
    await server.start()
    try:
        yield Address(listen.host, port)
    finally:
        await server.stop(1.0)
