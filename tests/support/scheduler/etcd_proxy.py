"""A proxy between schedulers and etcd that can drop a chosen transaction or its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from duplane.scheduler.etcd.v3 import etcd_pb2

_TXN = "/etcdserverpb.KV/Txn"


class EtcdProxy(grpc.GenericRpcHandler):
    """Forwards all calls to the etcd member at `target`, until it drops a transaction."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.has_lost = asyncio.Event()
        self._channel = grpc.aio.insecure_channel(target)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self._is_chosen: Callable[[etcd_pb2.TxnRequest], bool] = lambda _: False
        self._is_executed = False

    async def __aenter__(self) -> EtcdProxy:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def lose(self, is_chosen: Callable[[etcd_pb2.TxnRequest], bool], *, is_executed: bool) -> None:
        """Drop the first chosen transaction and everything after it.

        If `is_executed`, the transaction reaches etcd, and only its answer is dropped.
        """
        self._is_chosen = is_chosen
        self._is_executed = is_executed

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method: Any = handler_call_details.method

        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._forward(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _forward(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        call: Any = self._channel.stream_stream(method)()
        sending = asyncio.create_task(self._send(method, requests, call))
        try:
            async for answer in call:
                if self.has_lost.is_set():
                    await asyncio.Event().wait()
                await context.write(answer)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        finally:
            sending.cancel()
            call.cancel()

    async def _send(self, method: str, requests: AsyncIterator[bytes], call: Any) -> None:
        async for request in requests:
            is_lost = self.has_lost.is_set()
            if not is_lost and method == _TXN:
                is_lost = self._is_chosen(etcd_pb2.TxnRequest.FromString(request))
            if is_lost and (self.has_lost.is_set() or not self._is_executed):
                self.has_lost.set()
                await asyncio.Event().wait()
            await call.write(request)
            if is_lost:
                self.has_lost.set()
        await call.done_writing()
