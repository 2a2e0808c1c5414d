"""The etcd client with real members: calls, users, TLS and members that fail."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.certificates import write_certificate
from support.ports import free_ports
from support.scheduler.etcd_server import EtcdCluster
from support.time_limits import WITHIN_S

from duplane.scheduler.etcd.client import CALL_TIMEOUT_S, EtcdClient, EtcdError, NoAnswerError
from duplane.scheduler.etcd.credentials import Credentials
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.etcd.watch import PrefixWatch
from duplane.scheduler.key_files import StoreCredentials
from duplane.scheduler.settings import SchedulerSettings


async def call(client: EtcdClient, path: str, request: Any) -> None:
    """Call a method of etcd.

    `etcd_pb2` lacks the message of this method, so `request` is another message that has the same
    fields.
    """
    channel = client.endpoints.pick().channel
    send = channel.unary_unary(path, request_serializer=type(request).SerializeToString)
    await send(request, timeout=WITHIN_S, metadata=await client.metadata())


async def test_pages_are_of_one_revision(client: EtcdClient, prefix: str) -> None:
    keys = [f"{prefix}{number:05}".encode() for number in range(1200)]
    for key in keys:
        await client.put(key, b"value")
    header, found = await client.read_all(prefix.encode())
    assert [one.key for one in found] == keys
    assert found[-1].mod_revision == header.revision
    assert await client.delete(keys[0], keys[-1]) == 1199
    assert [one.key for one in (await client.read(keys[-1])).kvs] == keys[-1:]


async def test_transaction_is_executed_only_if_its_conditions_hold(
    client: EtcdClient, prefix: str
) -> None:
    key = prefix.encode()
    request = etcd_pb2.TxnRequest(
        compare=[etcd_pb2.Compare(key=key, target=etcd_pb2.Compare.MOD, mod_revision=0)],
        success=[etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=b"1"))],
    )
    first, second = await client.txn(request), await client.txn(request)
    assert (first.succeeded, second.succeeded) == (True, False)
    assert second.header.revision == first.header.revision


async def test_lease_can_be_made_and_ended_twice(client: EtcdClient, prefix: str) -> None:
    lease = secrets.randbits(62)
    await client.grant_lease(lease, 60)
    await client.grant_lease(lease, 60)
    assert 0 < await client.lease_ttl_s(lease) <= 60
    await client.put(prefix.encode(), b"", lease)
    await client.revoke_lease(lease)
    await client.revoke_lease(lease)
    assert await client.lease_ttl_s(lease) == -1
    assert not (await client.read(prefix.encode())).kvs
    with pytest.raises(EtcdError) as refused:
        await client.put(prefix.encode(), b"", lease)
    assert refused.value.code is grpc.StatusCode.NOT_FOUND


async def test_another_member_is_called_after_one_that_does_not_answer(
    etcd: EtcdCluster, prefix: str
) -> None:
    (port,) = free_ports(1)
    client = EtcdClient([f"127.0.0.1:{port}", *etcd.addresses])
    with pytest.raises(NoAnswerError):
        await client.put(prefix.encode(), b"never repeated by the client")
    await client.put(prefix.encode(), b"at the other member")
    await client.close()
    client = EtcdClient([f"127.0.0.1:{port}", *etcd.addresses])
    assert len((await client.read(prefix.encode())).kvs) == 1, "a read is repeated"
    await client.close()


@pytest.mark.timing
async def test_call_to_a_frozen_member_is_bounded(tmp_path: Path) -> None:
    async with EtcdCluster.running(tmp_path) as cluster:
        client = EtcdClient(cluster.addresses)
        await client.put(b"key", b"")
        cluster.members[0].freeze()
        begin = time.monotonic()
        with pytest.raises(NoAnswerError):
            await client.put(b"key", b"")
        assert time.monotonic() - begin < 10 * CALL_TIMEOUT_S
        await client.close()


async def test_token_that_etcd_does_not_know_is_replaced(tmp_path: Path) -> None:
    async with EtcdCluster.running(tmp_path) as cluster:
        admin, stranger = EtcdClient(cluster.addresses), EtcdClient(cluster.addresses)
        fields = etcd_pb2.AuthenticateRequest
        await call(admin, "/etcdserverpb.Auth/UserAdd", fields(name="root", password="p"))
        # The second field is the role.
        await call(admin, "/etcdserverpb.Auth/UserGrantRole", fields(name="root", password="root"))
        await call(admin, "/etcdserverpb.Auth/AuthEnable", etcd_pb2.WatchProgressRequest())
        user = EtcdClient(cluster.addresses, Credentials(user="root", password="p"))
        await user.put(b"key", b"1")
        cluster.kill()
        await cluster.start()  # the tokens of users do not survive a restart
        await user.read(b"key")
        await user.put(b"key", b"2")
        with pytest.raises(EtcdError):
            await stranger.put(b"key", b"3")
        for one in (admin, stranger, user):
            await one.close()


async def test_client_certificate_is_used(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "127.0.0.1")
    flags = ("--cert-file", str(certificate), "--key-file", str(key))
    flags += ("--trusted-ca-file", str(certificate), "--client-cert-auth")
    async with EtcdCluster.running(tmp_path, flags=flags) as cluster:
        trust = certificate.read_bytes()
        known = grpc.ssl_channel_credentials(trust, key.read_bytes(), trust)
        client = EtcdClient(cluster.addresses, Credentials(tls=known))
        await client.put(b"key", b"")
        unknown = grpc.ssl_channel_credentials(trust)
        stranger = EtcdClient(cluster.addresses, Credentials(tls=unknown))
        with pytest.raises(NoAnswerError):
            await stranger.put(b"key", b"")
        await client.close()
        await stranger.close()


async def test_new_credentials_are_used_for_new_calls_and_running_ones_continue(
    tmp_path: Path,
) -> None:
    certificate, key = write_certificate(tmp_path, "127.0.0.1")
    flags = ("--cert-file", str(certificate), "--key-file", str(key))
    flags += ("--trusted-ca-file", str(certificate), "--client-cert-auth")
    async with EtcdCluster.running(tmp_path, flags=flags) as cluster:
        own = tmp_path / "own"
        own.mkdir()
        own_certificate, own_key = write_certificate(own, "unknown")
        settings = SchedulerSettings(
            store=f"etcd://{cluster.addresses[0]}",
            store_ca=certificate,
            store_cert=own_certificate,
            store_key=own_key,
        )
        credentials = StoreCredentials(settings)
        client = EtcdClient(cluster.addresses, credentials.current)
        credentials.on_change = client.use
        with pytest.raises(NoAnswerError):
            await client.put(b"key", b"")
        assert not credentials.reload_if_changed()
        own_certificate.write_bytes(certificate.read_bytes())
        assert not credentials.reload_if_changed()  # its key is not there yet
        own_key.write_bytes(b"")  # gRPC would end the process
        assert not credentials.reload_if_changed()
        own_key.write_bytes(key.read_bytes())
        assert credentials.reload_if_changed()
        await client.put(b"key", b"1")
        watch = PrefixWatch(
            client, b"key", 1, (await client.read(b"key")).header.cluster_id, ignore
        )
        async with contextlib.aclosing(watch.batches()) as batches:
            assert await asyncio.wait_for(anext(batches), WITHIN_S)
            own_certificate.touch()
            assert credentials.reload_if_changed()
            await client.put(b"key", b"2")
            (event,) = await asyncio.wait_for(anext(batches), WITHIN_S)
            assert event.kv.value == b"2"
        await watch.close()
        await client.close()


def ignore(_: float) -> None:
    return
