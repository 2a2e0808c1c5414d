"""Keeps the facts of one scheduler up to date with etcd, and publishes the changes."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
from collections.abc import Callable, Sequence

from duplane.fabric.repeated_log import RepeatedLog
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.etcd.client import EtcdClient, EtcdError, NoAnswerError
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.etcd.watch import CompactedError, PrefixWatch
from duplane.scheduler.store.base import Change
from duplane.scheduler.store.etcd.facts import Facts

RETRY_PAUSE_S = 0.1
_MAX_REVISION = 2**63 - 1

_log = logging.getLogger(__name__)


class Mirror:
    """The facts, and the tasks that wait until the facts reach a revision or meet a condition.

    `run` calls the listeners, one revision after the other.
    """

    def __init__(self, client: EtcdClient, facts: Facts) -> None:
        self.facts = facts
        self.listeners: list[Callable[[Change], None]] = []
        self.key_listeners: list[Callable[[Sequence[registry_pb2.VerificationKey]], None]] = []
        self.has_found_sessions = False  # whether other schedulers had sessions at the start
        self._has_read = False
        self._client = client
        self._absence = RepeatedLog(_log)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap, by revision
        self._keys: Sequence[registry_pb2.VerificationKey] = ()
        self._counter = itertools.count()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Apply the events of etcd until cancelled."""
        while True:
            watch = PrefixWatch(self._client, self.facts.keys.prefix, await self._read_all())
            try:
                async with contextlib.aclosing(watch.batches()) as batches:
                    async for batch in batches:
                        self._apply(batch)
            except CompactedError as error:
                _log.warning("events of etcd were missed (%s); reading everything", error)
            finally:
                await watch.close()

    async def reached(self, revision: int) -> None:
        """Wait until every change up to a revision has been published."""
        if revision <= self.facts.revision:
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (revision, next(self._counter), future))
        await future

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until the facts satisfy a condition."""
        while not is_true():
            await self._news.wait()

    async def _read_all(self) -> int:
        """Replace the facts by the content of etcd; return the revision to watch from."""
        while True:
            try:
                revision, held = await self._client.read_all(self.facts.keys.prefix)
            except (EtcdError, NoAnswerError) as error:
                self._absence.report(f"etcd cannot be read: {error}")
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                self._absence.resolve("etcd was read")
                if revision < self.facts.revision:
                    _log.error("etcd went back from revision %d", self.facts.revision)
                    self._release(_MAX_REVISION)  # the awaited revisions will not come
                changes = self.facts.replace(held, revision)
                if not self._has_read:
                    self._has_read, self.has_found_sessions = True, bool(self.facts.sessions)
                self._publish(changes)
                return revision + 1

    def _apply(self, batch: Sequence[etcd_pb2.Event]) -> None:
        for revision, events in itertools.groupby(batch, lambda event: event.kv.mod_revision):
            self._publish(self.facts.apply(events, revision))

    def _publish(self, changes: Sequence[Change]) -> None:
        for change in changes:
            for listener in self.listeners:
                listener(change)
        keys = self.facts.verification_keys
        if keys is not self._keys:
            self._keys = keys
            for listener in self.key_listeners:
                listener(keys)
        self._release(self.facts.revision)
        self._news.set()
        self._news = asyncio.Event()

    def _release(self, revision: int) -> None:
        """End all waits for this revision or an earlier one."""
        while self._waiting and self._waiting[0][0] <= revision:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
