"""A simulated etcd: transactions, leases and watches, with lost, late and delayed messages.

`simulated_etcd` replaces the etcd client of the scheduler's store by the client of this simulation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from unittest import mock

import grpc

from duplane.scheduler.etcd.client import CALL_TIMEOUT_S, EtcdError, NoAnswerError
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.etcd.watch import CompactedError
from duplane.scheduler.store.etcd import mirror, session

_LOST_SHARES = (0.0, 0.02, 0.2)  # share of lost requests
_LATE_S = 3.0  # for this long after its client has given up, a request may still be executed
_HANG_SHARES = (0.0, 0.02, 0.3)  # share of watch batches that are delayed
_HANG_S = 4.0
PROBE_S = 2.0
_SLOW_S = 0.5  # until a transaction is executed; shorter than the time limit of a call
_History = Sequence[tuple[int, Sequence[etcd_pb2.Event]]]


class _Lease:
    """A lease and its keys."""

    def __init__(self, ttl_s: float, end: asyncio.TimerHandle) -> None:
        self.ttl_s = ttl_s
        self.end = end
        self.keys: dict[bytes, None] = {}  # a dict, because a dict keeps the order


class SimulatedEtcd:
    """The etcd cluster. The cluster never fails as a whole, but a client may be cut off from it."""

    def __init__(self) -> None:
        self.revision = 1
        self.held: dict[bytes, etcd_pb2.KeyValue] = {}
        self.news = asyncio.Event()  # replaced at every change
        self._history: list[tuple[int, Sequence[etcd_pb2.Event]]] = []
        self._compacted = 1
        self._leases: dict[int, _Lease] = {}

    def compact(self) -> None:
        """Delete all past events."""
        self._compacted = self.revision
        self._history.clear()

    def since(self, revision: int) -> _History:
        """Return the events from a revision on. Raises CompactedError if they were deleted."""
        if revision <= self._compacted and revision <= self.revision:
            raise CompactedError("compacted")
        late = itertools.takewhile(lambda one: one[0] >= revision, reversed(self._history))
        return list(late)[::-1]

    def execute(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        """Execute a transaction. Raises EtcdError if a lease has ended."""
        changes: list[etcd_pb2.RequestOp] = []
        response = self._decide(request, changes)
        for change in changes:
            lease = change.request_put.lease
            if lease and lease not in self._leases:
                message = "etcdserver: requested lease not found"
                raise EtcdError(grpc.StatusCode.NOT_FOUND, message)
        self._apply(changes)
        response.header.revision = self.revision
        return response

    def grant(self, lease: int, ttl_s: float) -> None:
        """Make a lease, unless it exists."""
        loop = asyncio.get_running_loop()
        if lease not in self._leases:
            self._leases[lease] = _Lease(ttl_s, loop.call_later(ttl_s, self.revoke, lease))

    def renew(self, lease: int) -> bool:
        """Restart the time of a lease. Return False if the lease has ended."""
        known = self._leases.get(lease)
        if known:
            known.end.cancel()
            known.end = asyncio.get_running_loop().call_later(known.ttl_s, self.revoke, lease)
        return known is not None

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys."""
        if known := self._leases.pop(lease, None):
            known.end.cancel()
            deletions = [etcd_pb2.DeleteRangeRequest(key=key) for key in known.keys]
            self._apply([etcd_pb2.RequestOp(request_delete_range=one) for one in deletions])

    def end_one(self, chance: random.Random) -> None:
        """End a random lease, as an etcd leader may do after it was frozen."""
        if self._leases:
            self.revoke(chance.choice(list(self._leases)))

    def _decide(
        self, request: etcd_pb2.TxnRequest, changes: list[etcd_pb2.RequestOp]
    ) -> etcd_pb2.TxnResponse:
        """Evaluate all comparisons, also those of inner transactions, before any change."""
        succeeded = all(map(self._holds, request.compare))
        response = etcd_pb2.TxnResponse(succeeded=succeeded)
        for operation in request.success if succeeded else request.failure:
            if operation.HasField("request_txn"):
                inner = self._decide(operation.request_txn, changes)
                response.responses.add(response_txn=inner)
            else:
                changes.append(operation)
                response.responses.add()
        return response

    def _holds(self, compare: etcd_pb2.Compare) -> bool:
        if compare.target == etcd_pb2.Compare.CREATE:
            present = self.held.get(compare.key)
            return (present.create_revision if present else 0) == compare.create_revision
        if compare.range_end:
            found = self._range(compare.key, compare.range_end)
            return all(self.held[key].mod_revision < compare.mod_revision for key in found)
        present = self.held.get(compare.key)
        return (present.mod_revision if present else 0) == compare.mod_revision

    def _range(self, key: bytes, range_end: bytes) -> Sequence[bytes]:
        if not range_end:
            return [key] if key in self.held else []
        return [one for one in self.held if key <= one < range_end]

    def _apply(self, changes: Iterable[etcd_pb2.RequestOp]) -> None:
        events: dict[bytes, etcd_pb2.Event] = {}
        revision = self.revision + 1
        for change in changes:
            if change.HasField("request_put"):
                events[change.request_put.key] = self._put(change.request_put, revision)
                continue
            deletion = change.request_delete_range
            for key in self._range(deletion.key, deletion.range_end):
                self._detach(self.held.pop(key))
                gone = etcd_pb2.KeyValue(key=key, mod_revision=revision)
                events[key] = etcd_pb2.Event(type=etcd_pb2.Event.DELETE, kv=gone)
        if events:
            self.revision = revision
            self._history.append((revision, list(events.values())))
            self.news.set()
            self.news = asyncio.Event()

    def _put(self, put: etcd_pb2.PutRequest, revision: int) -> etcd_pb2.Event:
        former = self.held.get(put.key)
        if former:
            self._detach(former)
        held = etcd_pb2.KeyValue(
            key=put.key,
            value=put.value,
            lease=put.lease,
            create_revision=former.create_revision if former else revision,
            mod_revision=revision,
        )
        self.held[put.key] = held
        if put.lease:
            self._leases[put.lease].keys[put.key] = None
        return etcd_pb2.Event(kv=held)

    def _detach(self, held: etcd_pb2.KeyValue) -> None:
        if lease := self._leases.get(held.lease):
            lease.keys.pop(held.key, None)


class SimulatedClient:
    """The client of one scheduler. It has the methods of EtcdClient that the store calls."""

    def __init__(self, etcd: SimulatedEtcd, chance: random.Random) -> None:
        self.etcd = etcd
        self.chance = chance
        # This share of the watch batches is delayed, and this share of the transactions is slow.
        self.hang_share = chance.choice(_HANG_SHARES)
        self.lost_share = chance.choice(_LOST_SHARES)
        self._cut_until = 0.0
        self.has_refused = asyncio.Event()
        self.is_blind = False  # watches get no events, although all requests are answered

    def cut(self, duration_s: float) -> None:
        """Cut the connection to etcd for some time."""
        self._cut_until = asyncio.get_running_loop().time() + duration_s

    @property
    def is_cut(self) -> bool:
        """Whether the connection to etcd is cut."""
        return asyncio.get_running_loop().time() < self._cut_until

    async def until_reached(self) -> None:
        """Wait for the end of a cut."""
        if self.is_cut:
            await asyncio.sleep(self._cut_until - asyncio.get_running_loop().time())

    async def txn(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        chance = self.chance
        loop = asyncio.get_running_loop()
        fault = chance.choice(("request", "answer", "late"))
        is_faulty = self.is_cut or chance.random() < self.lost_share
        is_slow = chance.random() < self.hang_share
        await asyncio.sleep(chance.uniform(0, _SLOW_S if is_slow else 0.01))
        if is_faulty and (fault == "request" or self.is_cut):
            await self._give_up()
        if is_faulty and fault == "late":
            loop.call_later(chance.uniform(0, _LATE_S), self._execute_late, request)
            await self._give_up()
        response = self.etcd.execute(request)
        if is_faulty:
            await self._give_up()
        await asyncio.sleep(chance.uniform(0, 0.01))
        return response

    async def _give_up(self) -> None:
        await asyncio.sleep(CALL_TIMEOUT_S)
        raise NoAnswerError("lost")

    def _execute_late(self, request: etcd_pb2.TxnRequest) -> None:
        with contextlib.suppress(EtcdError):
            self.etcd.execute(request)

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        put = etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value, lease=lease))
        return (await self.txn(etcd_pb2.TxnRequest(success=[put]))).header.revision

    async def read_all(
        self, prefix: bytes
    ) -> tuple[etcd_pb2.ResponseHeader, Sequence[etcd_pb2.KeyValue]]:
        await self._pass()
        header = etcd_pb2.ResponseHeader(revision=self.etcd.revision, cluster_id=1)
        return header, list(self.etcd.held.values())

    async def grant_lease(self, lease: int, ttl_s: int) -> None:
        await self._pass()
        self.etcd.grant(lease, ttl_s)

    async def revoke_lease(self, lease: int) -> None:
        await self._pass()
        self.etcd.revoke(lease)

    async def alarms(self) -> Sequence[str]:
        """Return no alarms."""
        return ()

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    async def _pass(self) -> None:
        await asyncio.sleep(self.chance.uniform(0, 0.01))
        if self.is_cut:
            await self._give_up()


class SimulatedWatch:
    """A watch of a simulated client; it may hang for some time, but loses no event."""

    def __init__(
        self,
        client: SimulatedClient,
        prefix: bytes,
        start_revision: int,
        cluster_id: int,
        on_current: Callable[[float], None],
    ) -> None:
        del prefix, cluster_id  # there is one simulated etcd, which has no other keys
        self._client = client
        self._next_revision = start_revision
        self._on_current = on_current

    async def batches(self) -> AsyncGenerator[Sequence[etcd_pb2.Event]]:
        """Yield events, in order. Raises CompactedError if events were deleted."""
        etcd, chance = self._client.etcd, self._client.chance
        while True:
            news = etcd.news
            found = etcd.since(self._next_revision)
            if self._client.is_blind:
                await asyncio.sleep(PROBE_S)
                continue
            if not found:
                if not self._client.is_cut:
                    self._on_current(asyncio.get_running_loop().time())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_S):
                        await news.wait()
                if not news.is_set():
                    continue
                hangs = chance.random() < self._client.hang_share
                await asyncio.sleep(chance.uniform(0, _HANG_S if hangs else 0.01))
                await self._client.until_reached()
                continue
            self._next_revision = found[-1][0] + 1
            yield [event for _, events in found for event in events]

    async def close(self) -> None:
        """Do nothing: there are no connections."""


class SimulatedKeeper:
    """Renews a lease of a simulated client while the client reaches etcd."""

    def __init__(
        self,
        client: SimulatedClient,
        lease: int,
        ttl_s: int,
        on_renewed: Callable[[float], None] | None = None,
    ) -> None:
        self._client = client
        self._lease = lease
        self._ttl_s = ttl_s
        self._on_renewed = on_renewed

    async def run(self) -> None:
        """Renew the lease; return when the lease has ended."""
        while self._client.etcd.renew(self._lease):
            if self._on_renewed:
                self._on_renewed(asyncio.get_running_loop().time())
            await asyncio.sleep(self._ttl_s / 3)
            await self._client.until_reached()

    async def close(self) -> None:
        """Do nothing: there are no connections."""


@contextlib.contextmanager
def simulated_etcd() -> Generator[None]:
    """Make stores with a simulated client also use simulated watches and keepers."""
    with (
        mock.patch.object(mirror, "PrefixWatch", SimulatedWatch),
        mock.patch.object(session, "LeaseKeeper", SimulatedKeeper),
    ):
        yield
