"""The requests of operators to drain workers that wait for etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from duplane.scheduler.store.base import DrainRequest
from duplane.scheduler.store.etcd import operations
from duplane.scheduler.store.etcd.commits import Commits
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.transactions import Step


class Drains:
    """At most one operation for each worker; it ends when the latest request is in etcd.

    A request to stop stays the latest one, because it cannot be taken back.
    """

    def __init__(
        self,
        commits: Commits,
        begin: Callable[[Coroutine[None, None, bool]], asyncio.Task[bool]],
    ) -> None:
        """Commit with `commits`. `begin` starts the task of an operation."""
        self._commits = commits
        self._begin = begin
        self._latest: dict[str, DrainRequest] = {}  # by worker id, as long as the operation waits
        self._operations: dict[str, asyncio.Task[bool]] = {}

    def begin(self, worker_id: str, request: DrainRequest) -> asyncio.Task[bool]:
        """Begin an operation, or give the one that waits another request.

        The result is False if the worker is not registered. Do not cancel the operation. Raises
        FabricError UNAVAILABLE if the store is closed.
        """
        operation = self._operations.get(worker_id)
        if operation is None:
            operation = self._operations[worker_id] = self._begin(self._operate(worker_id))
            self._latest[worker_id] = request
        elif self._latest[worker_id] is not DrainRequest.STOP:
            self._latest[worker_id] = request
        return operation

    async def _operate(self, worker_id: str) -> bool:
        written = DrainRequest.NONE

        def step_of(facts: Facts) -> Step[bool]:
            nonlocal written
            written = self._latest[worker_id]
            return operations.drain(facts, worker_id, written)

        try:
            while True:
                is_registered = await self._commits.commit(step_of)
                if written is self._latest[worker_id]:
                    return is_registered
        finally:
            del self._operations[worker_id], self._latest[worker_id]
