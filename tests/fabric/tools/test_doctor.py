"""`duplane doctor` calls real peers: schedulers, workers and etcd."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from google.protobuf.message import Message
from support.fabric.tls_fabric import FabricCertificates, tls_fabric
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import SchedulerHarness
from support.time_limits import WITHIN_S
from support.tools.command import run_command

from duplane.fabric.tls.identity import Role
from duplane.scheduler.etcd import client as etcd
from duplane.scheduler.etcd.client import EtcdClient
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.tools.doctor import peers
from duplane.tools.operators import snapshots

CHEAP_LOGIN = ("--bcrypt-cost", "4")  # by default a login takes a tenth of a second of CPU
ROOT_USER = etcd_pb2.AuthenticateRequest(name="root", password="p")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may miss the limits of the doctor and of the client of etcd."""
    monkeypatch.setattr(etcd, "CALL_TIMEOUT_S", WITHIN_S)
    monkeypatch.setattr(peers, "TIMEOUT_S", WITHIN_S)
    monkeypatch.setattr(snapshots, "TIMEOUT_S", WITHIN_S)


async def doctor(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the findings."""
    code, output = await asyncio.to_thread(run_command, "doctor", *arguments, "--json")
    answer = orjson.loads(output)
    assert answer["ok"] is (code == 0)
    return code, answer["findings"]


def of(findings: list[dict[str, Any]], *checks: str) -> list[tuple[str, str]]:
    return [(one["level"], one["flag"]) for one in findings if one["check"] in checks]


def messages(findings: list[dict[str, Any]]) -> str:
    return "\n".join(one["message"] for one in findings if one["level"] == "error")


async def test_edge_and_worker_call_their_peers_with_their_certificates(tmp_path: Path) -> None:
    certificates = FabricCertificates(tmp_path)
    own = ("--fabric-tls", str(certificates.issue(Role.EDGE)))
    async with tls_fabric(certificates) as fabric:
        at = ("--scheduler", fabric.scheduler.address)
        code, found = await doctor("edge", *at, *own)
        assert code == 0, found
        assert of(found, "peers") == [("ok", "--scheduler"), ("ok", "--advertise")]
        worker = ("--fabric-tls", str(certificates.issue(Role.WORKER)), "--worker-id", "host-2")
        code, found = await doctor("worker", "--checkpoint", "scripted", *at, *worker)
        assert code == 0, found
        assert of(found, "peers") == [("ok", "--scheduler")]

        code, found = await doctor("edge", *at)
        assert code == 1
        assert of(found, "peers") == [("error", "--fabric-tls")]
        assert "needs --fabric-tls" in messages(found)
        foreign = FabricCertificates(tmp_path / "foreign").issue(Role.EDGE)
        code, found = await doctor("edge", *at, "--fabric-tls", str(foreign))
        assert code == 1
        assert of(found, "peers") == [("error", "--fabric-tls")]

        code, found = await doctor("edge", *at, *own, "--pool", "none")
        assert code == 0
        assert of(found, "peers") == [("ok", "--scheduler"), ("warning", "--pool")]


async def test_worker_that_edges_cannot_reach_is_an_error() -> None:
    async with SchedulerHarness.running() as scheduler:
        await scheduler.worker("w1", address="127.0.0.1:1")
        code, found = await doctor("edge", "--scheduler", scheduler.address)
    assert code == 1
    assert of(found, "peers") == [("ok", "--scheduler"), ("error", "--advertise")]
    assert "worker at 127.0.0.1:1" in messages(found)


async def call(client: EtcdClient, method: str, request: Message) -> None:
    """Call a method of etcd's Auth service; `request` has the fields of the method's message."""
    channel = client.endpoints.pick().channel
    send: Any = channel.unary_unary(
        f"/etcdserverpb.Auth/{method}", request_serializer=type(request).SerializeToString
    )
    await send(request, timeout=WITHIN_S)


async def test_rights_in_etcd_are_tried(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.touch(mode=0o600)
    password.write_text("p")
    async with EtcdCluster.running(tmp_path / "etcd", flags=CHEAP_LOGIN) as cluster:
        store = ("--store", cluster.url("/fabric/"))
        code, found = await doctor("scheduler", *store)
        assert code == 0, found
        assert of(found, "peers", "rights in etcd") == [("ok", "--store")] * 4

        admin = EtcdClient(cluster.addresses)
        await call(admin, "UserAdd", ROOT_USER)
        await call(admin, "UserAdd", etcd_pb2.AuthenticateRequest(name="poor", password="p"))
        # The second field is the role.
        granted = etcd_pb2.AuthenticateRequest(name="root", password="root")
        await call(admin, "UserGrantRole", granted)
        await call(admin, "AuthEnable", etcd_pb2.WatchProgressRequest())
        await admin.close()

        user = (*store, "--store-password", str(password), "--store-user")
        code, found = await doctor("scheduler", *user, "root")
        assert code == 0, found
        code, found = await doctor("scheduler", *user, "poor")
        assert code == 1
        rights = of(found, "rights in etcd")
        assert rights[:2] == [("error", "--store-user")] * 2
        assert "permission denied" in messages(found)
        password.write_text("wrong")
        code, found = await doctor("scheduler", *user, "root")
        assert code == 1
        assert ("error", "--store-user") in of(found, "peers", "rights in etcd")
