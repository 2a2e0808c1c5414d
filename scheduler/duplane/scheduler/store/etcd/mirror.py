"""Keeps the facts of one scheduler up to date with etcd, and publishes the changes."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from duplane.fabric.repeated_log import RepeatedLog
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.etcd.client import EtcdClient, EtcdError, NoAnswerError
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.etcd.watch import CompactedError, OtherHistoryError, PrefixWatch
from duplane.scheduler.store.base import Change
from duplane.scheduler.store.etcd.facts import Facts

RETRY_PAUSE_S = 0.1
# A portion of a large revision ends after this many events and changes, or after this time.
PORTION = 64
_PORTION_S = 0.002
_MAX_REVISION = 2**63 - 1

_log = logging.getLogger(__name__)


class Mirror:
    """The facts, and the tasks that wait until the facts reach a revision or meet a condition.

    `run` applies one revision after the other and calls the listeners. It applies a large revision
    in portions, between which other tasks run. From the first portion to the last one the facts and
    the published state are partial. While they are partial, no transaction is made from the facts,
    no operation is answered from them, no wait of this class ends, and no grant is chosen from the
    published state. Readers of the published state find each worker, grant and ticket as it was
    before the revision or after it.
    """

    def __init__(
        self,
        client: EtcdClient,
        facts: Facts,
        clock: Callable[[], float] = time.monotonic,
        on_current: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Read and watch etcd. `PrefixWatch` says when `on_current` is called."""
        self.facts = facts
        self.is_partial = False  # a part of a revision is applied or published
        self.listeners: list[Callable[[Change], None]] = []
        self.key_listeners: list[Callable[[Sequence[registry_pb2.VerificationKey]], None]] = []
        self.has_found_sessions = False  # whether other schedulers had sessions at the start
        self._has_read = False
        self._client = client
        self._on_current = on_current
        self._clock = clock
        self._portion_count = 0  # steps of the present portion
        self._portion_end = 0.0
        self._revision = 0  # the last revision that was published
        self._cluster_id = 0
        self._absence = RepeatedLog(_log)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap, by revision
        self._keys: Sequence[registry_pb2.VerificationKey] = ()
        self._counter = itertools.count()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Apply the events of etcd until cancelled."""
        is_other_history = False
        while True:
            start_revision = await self._read_all(is_other_history=is_other_history)
            prefix = self.facts.keys.prefix
            watch = PrefixWatch(
                self._client, prefix, start_revision, self._cluster_id, self._on_current
            )
            try:
                async with contextlib.aclosing(watch.batches()) as batches:
                    async for batch in batches:
                        await self._apply_batch(batch)
            except CompactedError as error:
                _log.warning("events of etcd were missed (%s); reading everything", error)
                is_other_history = isinstance(error, OtherHistoryError)
            finally:
                await watch.close()

    async def reached(self, revision: int) -> None:
        """Wait until every change up to a revision has been published."""
        if revision <= self._revision:
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (revision, next(self._counter), future))
        await future

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until the facts are not partial and satisfy a condition."""
        while self.is_partial or not is_true():
            await self._news.wait()

    async def until_whole(self) -> None:
        """Wait until the facts and the published state are those of one revision."""
        await self.until(lambda: True)

    async def _read_all(self, *, is_other_history: bool = False) -> int:
        """Replace the facts by the content of etcd; return the revision to watch from.

        `is_other_history` means that the watch has raised `OtherHistoryError`. The read alone may
        not show this, because etcd may have reached the revision of the facts again by now.
        """
        while True:
            try:
                header, held = await self._client.read_all(self.facts.keys.prefix)
            except (EtcdError, NoAnswerError) as error:
                self._absence.report(f"etcd cannot be read: {error}")
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                self._absence.resolve("etcd was read")
                is_other_history |= self._has_other_history(header)
                if is_other_history:
                    self._release(_MAX_REVISION)  # the awaited revisions will not come
                changes = self.facts.replace(
                    held, header.revision, is_other_history=is_other_history
                )
                self._begin_portion()
                await self._apply(changes)
                self._note_read()
                return header.revision + 1

    def _has_other_history(self, header: etcd_pb2.ResponseHeader) -> bool:
        """True if this is another etcd cluster, or has lost revisions that the facts contain."""
        known, self._cluster_id = self._cluster_id, header.cluster_id
        if known not in (0, header.cluster_id):
            _log.error("etcd was exchanged: cluster %x became %x", known, header.cluster_id)
            return True
        if header.revision < self.facts.revision:
            _log.error("etcd went back from revision %d", self.facts.revision)
            return True
        return False

    def _note_read(self) -> None:
        """Record, at the first read only, whether other schedulers have sessions."""
        if not self._has_read:
            self._has_read = True
            self.has_found_sessions = bool(self.facts.sessions)

    async def _apply_batch(self, batch: Sequence[etcd_pb2.Event]) -> None:
        self._begin_portion()
        for revision, events in itertools.groupby(batch, lambda event: event.kv.mod_revision):
            if self._portion_count >= PORTION // 2:  # small revisions are applied as a whole
                await self._pause()
            await self._apply(self.facts.apply(events, revision))

    async def _apply(self, changes: Iterator[Change | None]) -> None:
        """Apply one revision and publish its changes. Pause after each portion."""
        self.is_partial = True
        for change in changes:
            if change:
                self._note_read()
                for listener in self.listeners:
                    listener(change)
            self._portion_count += 1
            if self._portion_count >= PORTION or self._clock() >= self._portion_end:
                await self._pause()
        self.is_partial = False
        self._publish_revision()

    async def _pause(self) -> None:
        await asyncio.sleep(0)
        self._begin_portion()

    def _begin_portion(self) -> None:
        self._portion_count = 0
        self._portion_end = self._clock() + _PORTION_S

    def _publish_revision(self) -> None:
        """End the waits for this revision."""
        keys = self.facts.verification_keys
        if keys is not self._keys:
            self._keys = keys
            for listener in self.key_listeners:
                listener(keys)
        self._revision = self.facts.revision
        self._release(self._revision)
        self._news.set()
        self._news = asyncio.Event()

    def _release(self, revision: int) -> None:
        """End all waits for this revision or an earlier one."""
        while self._waiting and self._waiting[0][0] <= revision:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
