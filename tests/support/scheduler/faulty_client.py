"""A client of etcd whose calls a test delays, refuses or loses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
from support.time_limits import WITHIN_S

from duplane.scheduler.etcd.client import EtcdClient, EtcdError, NoAnswerError
from duplane.scheduler.etcd.credentials import Credentials
from duplane.scheduler.etcd.url import EtcdUrl
from duplane.scheduler.etcd.v3 import etcd_pb2


class FaultyClient(EtcdClient):
    """The client of one store.

    `next_fault` loses the answer of the next transaction, which is "executed", "executed later" (by
    `execute_late`) or "not executed". `before_next` is awaited before the next transaction.
    """

    def __init__(self, url: EtcdUrl) -> None:
        super().__init__(url.addresses, Credentials())
        self.next_fault = ""
        self.before_next: Callable[[], Awaitable[object]] | None = None
        self.sent_count = 0  # transactions
        self.lease = 0  # the last one that was granted
        self._late: list[etcd_pb2.TxnRequest] = []
        self._answers = asyncio.Event()
        self._answers.set()
        self._has_asked = asyncio.Event()
        self._refusal: EtcdError | None = None

    def hang(self) -> None:
        self._answers.clear()

    def refuse(self, code: grpc.StatusCode) -> None:
        self._refusal = EtcdError(code, "permission denied")

    def recover(self) -> None:
        self._refusal = None
        self._answers.set()

    async def asked(self) -> None:
        """Wait until the store sends the next request."""
        self._has_asked.clear()
        async with asyncio.timeout(WITHIN_S):
            await self._has_asked.wait()

    async def grant_lease(self, lease: int, ttl_s: int) -> None:
        self.lease = lease
        await super().grant_lease(lease, ttl_s)

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        await self._pass()
        return await super().put(key, value, lease)

    async def txn(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        await self._pass()
        if before := self.before_next:
            self.before_next = None
            await before()
        fault, self.next_fault = self.next_fault, ""
        if fault == "executed later":
            self._late.append(request)
        if fault in ("executed later", "not executed"):
            raise NoAnswerError(fault)
        self.sent_count += 1
        response = await super().txn(request)
        if fault:
            raise NoAnswerError(fault)
        return response

    async def execute_late(self) -> list[bool]:
        """Execute the late transactions, as a leader does that was frozen and continues.

        Returns which of them succeeded.
        """
        late, self._late = self._late, []
        send = super().txn
        return [(await send(request)).succeeded for request in late]

    async def _pass(self) -> None:
        self._has_asked.set()
        if self._refusal:
            raise self._refusal
        await self._answers.wait()
