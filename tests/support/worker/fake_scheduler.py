"""A scheduler for the tests of a worker; the test decides what the scheduler sends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc.aio
from support.ports import free_ports
from support.time_limits import WITHIN_S

from duplane.fabric.channel import FabricServer
from duplane.fabric.errors import FabricError, abort
from duplane.fabric.lease_signing import LeaseSigner
from duplane.fabric.v1 import registry_pb2, registry_pb2_grpc

REGISTRY = "duplane.fabric.v1.RegistryService"


class FakeScheduler(registry_pb2_grpc.RegistryServiceServicer):
    """A RegistryService that stores the workers' messages and sends the test's messages."""

    def __init__(self) -> None:
        self.signer = LeaseSigner()
        self.epochs = itertools.count(101)
        self.epoch = 0
        self.registers: list[registry_pb2.Register] = []
        self.report = registry_pb2.Report()
        self.report_count = 0
        self.report_interval_s = 600  # only changes are reported while a test waits
        self.refusal: FabricError | None = None
        self.address = ""
        self._call: grpc.aio.ServicerContext[Any, Any] | None = None
        self._news = asyncio.Condition()
        self._server: FabricServer | None = None

    async def start(self, address: str = "") -> None:
        """Serve at an address, by default at a port that is free again after `stop`."""
        self._server = FabricServer(REGISTRY)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(self, self._server.grpc)
        self.address = await self._server.start(address or f"127.0.0.1:{free_ports(1)[0]}")

    async def set_serving(self, is_serving: bool) -> None:
        assert self._server
        await self._server.set_serving(is_serving)

    async def stop(self) -> None:
        assert self._server
        await self._server.stop(0)

    async def Attach(  # pyright: ignore[reportIncompatibleMethodOverride] - gRPC accepts this form too
        self, request_iterator, context
    ):
        request = await context.read()
        if self.refusal:
            async with self._news:
                self.registers.append(request.register)
                self._news.notify_all()
            await abort(context, self.refusal)
        self.epoch = next(self.epochs)
        registered = registry_pb2.Registered(
            worker_epoch=self.epoch, verification_keys=[self.signer.verification_key]
        )
        registered.report_interval.FromSeconds(self.report_interval_s)
        await context.write(registry_pb2.AttachResponse(registered=registered))
        self._call = context
        async with self._news:
            self.registers.append(request.register)
            self._news.notify_all()
        while (request := await context.read()) is not grpc.aio.EOF:
            async with self._news:
                self.report = request.report
                self.report_count += 1
                self._news.notify_all()

    async def tell(self, **message: Any) -> None:
        assert self._call
        await self._call.write(registry_pb2.AttachResponse(**message))

    async def until(self, is_true: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        """Wait until `is_true()`, which is called after each message of a worker, returns True."""
        async with asyncio.timeout(within_s), self._news:
            await self._news.wait_for(is_true)

    async def until_slot(self, slot: int, state: registry_pb2.SlotState) -> None:
        await self.until(
            lambda: len(self.report.slots) > slot and self.report.slots[slot].state == state
        )
