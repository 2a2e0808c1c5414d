"""Watches and leases of the etcd client while members die, hang and compact their history."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.scheduler.etcd_server import EtcdCluster

from duplane.scheduler.etcd.client import EtcdClient, NoAnswerError
from duplane.scheduler.etcd.lease import LeaseKeeper
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.etcd.watch import CompactedError, PrefixWatch

pytestmark = pytest.mark.timing

BOUND_S = 20.0


def ignore(_: float) -> None:
    pass


async def watch_of(client: EtcdClient, prefix: bytes, start_revision: int) -> PrefixWatch:
    """Return a watch of the cluster to which the members that answer now belong."""
    header = (await client.read(prefix, limit=1)).header
    return PrefixWatch(client, prefix, start_revision, header.cluster_id, ignore)


class Seen:
    """All values that a watch has delivered, in order."""

    def __init__(self, watch: PrefixWatch) -> None:
        self.values: list[bytes] = []
        self._news = asyncio.Condition()
        self._batches = watch.batches()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for batch in self._batches:
            async with self._news:
                self.values += [event.kv.value for event in batch]
                self._news.notify_all()

    async def until(self, count: int, bound_s: float = BOUND_S) -> None:
        async with asyncio.timeout(bound_s), self._news:
            await self._news.wait_for(lambda: len(self.values) >= count)

    async def failure(self) -> BaseException:
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(CompactedError) as failed:
                await self._reading
        return failed.value

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._batches.aclose()


async def put_until_confirmed(client: EtcdClient, key: bytes, value: bytes) -> None:
    """Put a value until etcd confirms it. A call without an answer may also have put the value."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                await client.put(key, value)
            except NoAnswerError:
                await asyncio.sleep(0.05)
            else:
                return


@pytest.fixture
async def three(tmp_path: Path) -> AsyncGenerator[EtcdCluster]:
    async with EtcdCluster.running(tmp_path, 3) as cluster:
        await cluster.leader()
        yield cluster


async def test_watch_begins_at_its_revision_and_keeps_order(
    client: EtcdClient, prefix: str
) -> None:
    key = prefix.encode()
    first = await client.put(key, b"0")
    for number in range(1, 20):
        await client.put(key, b"%d" % number)
    watch = await watch_of(client, key, first)
    seen = Seen(watch)
    await client.put(key, b"20")
    await seen.until(21)
    assert seen.values == [b"%d" % number for number in range(21)]
    await seen.close()


async def test_watch_resumes_after_a_restart_without_loss_or_repetition(tmp_path: Path) -> None:
    async with EtcdCluster.running(tmp_path) as cluster:
        client = EtcdClient(cluster.addresses)
        start = await client.put(b"/k/0", b"0")
        seen = Seen(await watch_of(client, b"/k/", start))
        await seen.until(1)
        for number in range(1, 4):
            cluster.kill()
            await cluster.start()
            await put_until_confirmed(client, b"/k/%d" % number, b"%d" % number)
            await seen.until(number + 1)
        assert list(dict.fromkeys(seen.values)) == [b"0", b"1", b"2", b"3"]
        await seen.close()
        await client.close()


async def test_compaction_is_reported(client: EtcdClient, prefix: str) -> None:
    key = prefix.encode()
    first = await client.put(key, b"0")
    last = await client.put(key, b"1")
    compact: Any = client.endpoints.pick().channel.unary_unary("/etcdserverpb.KV/Compact")
    # `etcd_pb2` has no CompactionRequest. `ID` of LeaseRevokeRequest has the field number and type
    # of the revision in CompactionRequest.
    await compact(etcd_pb2.LeaseRevokeRequest(ID=last).SerializeToString(), timeout=BOUND_S)
    await Seen(await watch_of(client, key, first)).failure()
    seen = Seen(await watch_of(client, key, last))
    await seen.until(1)
    assert seen.values == [b"1"]
    await seen.close()


@pytest.mark.slow
async def test_watch_leaves_a_frozen_member(three: EtcdCluster) -> None:
    client = EtcdClient(three.addresses)
    start = await client.put(b"/k/0", b"0")
    seen = Seen(await watch_of(client, b"/k/", start))
    await seen.until(1)
    frozen = three.members[0]  # a watch first uses the first address
    frozen.freeze()
    begin = time.monotonic()
    await put_until_confirmed(client, b"/k/1", b"1")
    await seen.until(2)
    assert time.monotonic() - begin < 15  # it takes 2 s on an idle machine
    frozen.thaw()
    await put_until_confirmed(client, b"/k/2", b"2")
    await seen.until(3)
    assert list(dict.fromkeys(seen.values)) == [b"0", b"1", b"2"]
    await seen.close()
    await client.close()


@pytest.mark.slow
async def test_connections_stay_open_while_idle(client: EtcdClient, prefix: str) -> None:
    """etcd ends connections with too many pings."""
    start = await client.put(prefix.encode(), b"0")
    watch = await watch_of(client, prefix.encode(), start)
    seen = Seen(watch)
    await seen.until(1)
    await asyncio.sleep(25)  # more than two pings
    await client.put(prefix.encode(), b"1")
    await seen.until(2, bound_s=5.0)
    await seen.close()


@pytest.mark.slow
async def test_lease_outlives_its_term_and_each_member(three: EtcdCluster) -> None:
    client = EtcdClient(three.addresses)
    lease = secrets.randbits(62)
    await client.grant_lease(lease, 5)
    keeper = LeaseKeeper(client, lease, 5)
    keeping = asyncio.create_task(keeper.run())
    for member in three.members:
        member.kill()
        await asyncio.sleep(3)  # longer than the interval at which the lease is renewed
        await three.restart(member)
    assert not keeping.done()
    assert await client.lease_ttl_s(lease) > 0
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await client.close()


async def test_end_of_a_lease_is_noticed(client: EtcdClient) -> None:
    lease = secrets.randbits(62)
    await client.grant_lease(lease, 2)
    keeper = LeaseKeeper(client, lease, 2)
    keeping = asyncio.create_task(keeper.run())
    await client.revoke_lease(lease)
    async with asyncio.timeout(BOUND_S):
        await keeping


async def test_member_that_takes_a_live_lease_for_ended_is_not_believed(
    etcd: EtcdCluster, client: EtcdClient
) -> None:
    """A leader that was frozen may report that a lease has ended, although it was renewed since."""
    lease = secrets.randbits(62)
    await client.grant_lease(lease, 5)
    keeper = LeaseKeeper(client, lease, 5)
    real, lies = keeper._renew, asyncio.Event()

    async def stale(endpoint: Any) -> int | None:
        if lies.is_set():
            return await real(endpoint)
        lies.set()
        return 0

    keeper._renew = stale
    keeping = asyncio.create_task(keeper.run())
    await lies.wait()
    await asyncio.sleep(1)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_closed_connections_are_forgotten(client: EtcdClient, prefix: str) -> None:
    opened = len(client._opened)
    await PrefixWatch(client, prefix.encode(), 1, 1, ignore).close()
    await LeaseKeeper(client, 1, 10).close()
    assert len(client._opened) == opened


async def test_exchanged_cluster_is_reported(client: EtcdClient, prefix: str) -> None:
    """If another cluster has taken over the addresses, a watch fails, whatever its revision.

    The other cluster may have the revision at which the watch begins, but with other values.
    """
    key = prefix.encode()
    first = await client.put(key, b"0")
    assert "is now the cluster" in str(
        await Seen(PrefixWatch(client, key, first, 1, ignore)).failure()
    )


class FakeMember(grpc.GenericRpcHandler):
    """A member that is at `revision`, of a cluster that is at revision 10."""

    def __init__(self, revision: int) -> None:
        self._revision = revision
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def __aenter__(self) -> FakeMember:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method: Any = handler_call_details.method
        if method.endswith("/Range"):
            return grpc.unary_unary_rpc_method_handler(self._range)
        return grpc.stream_stream_rpc_method_handler(self._watch)

    async def _range(self, request: bytes, context: object) -> bytes:
        header = etcd_pb2.ResponseHeader(cluster_id=1, revision=10)
        return etcd_pb2.RangeResponse(header=header).SerializeToString()

    async def _watch(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            is_new = etcd_pb2.WatchRequest.FromString(request).HasField("create_request")
            response = etcd_pb2.WatchResponse(created=is_new)
            response.header.revision = 10 if is_new else self._revision
            yield response.SerializeToString()
            if is_new and self._revision == 10:
                kv = etcd_pb2.KeyValue(key=b"k", value=b"ten", mod_revision=10)
                response = etcd_pb2.WatchResponse(events=[etcd_pb2.Event(kv=kv)])
                yield response.SerializeToString()


async def test_watch_leaves_a_member_that_lags_behind_the_cluster() -> None:
    """The member answers every probe, but with an old revision."""
    loop, confirmed, has_confirmed = asyncio.get_running_loop(), list[float](), asyncio.Event()

    def on_current(at: float) -> None:
        confirmed.append(at)
        has_confirmed.set()

    async with FakeMember(5) as lagging, FakeMember(10) as sound:
        client, began = EtcdClient([lagging.address, sound.address]), loop.time()
        seen = Seen(PrefixWatch(client, b"k", 6, 1, on_current))
        await seen.until(1)
        async with asyncio.timeout(BOUND_S):
            await has_confirmed.wait()
        assert seen.values == [b"ten"]
        assert confirmed[0] > began + 1, "the lagging member was confirmed"
        await seen.close()
        await client.close()


async def test_watch_confirms_that_it_is_up_to_date(client: EtcdClient, prefix: str) -> None:
    """Events of other keys do not reach the watch, but raise the revision."""
    loop, times = asyncio.get_running_loop(), asyncio.Queue[float]()
    header = (await client.read(prefix.encode(), limit=1)).header
    watch = PrefixWatch(
        client, prefix.encode(), header.revision + 1, header.cluster_id, times.put_nowait
    )
    seen = Seen(watch)
    for number in range(3):
        await client.put(prefix.encode() if number else b"/elsewhere", b"%d" % number)
        put_at = loop.time()
        async with asyncio.timeout(BOUND_S):
            while await times.get() < put_at:
                pass
        assert len(seen.values) == number
    await seen.close()
