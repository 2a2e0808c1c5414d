"""A scheduler that serves AdminService.Watch only, as a test scripts it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc.aio

from duplane.fabric.v1 import admin_pb2

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


@contextlib.asynccontextmanager
async def serve_watch(watch: Callable[[bytes, Any], Any]) -> AsyncGenerator[str]:
    """Serve with `watch`, a handler of gRPC that answers in bytes; yield the address."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(watch)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, {"Watch": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
