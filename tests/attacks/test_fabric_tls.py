"""Attacks on a fabric with mutual TLS: strangers, wrong roles, stolen names and certificates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from support.fabric.tls_fabric import LIFE, NAME, FabricCertificates, TlsFabric, tls_fabric
from support.scheduler.scheduler_harness import AUDIO, FakeWorker, register_message
from support.time_limits import WITHIN_S, until

from duplane.fabric import watched_files
from duplane.fabric.channel import FabricServer, open_channel
from duplane.fabric.channel_pool import ChannelPool
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.health_checks import HealthChecks
from duplane.fabric.tls.access import OPERATOR_KEY
from duplane.fabric.tls.certificates import fingerprint, read_files
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.tls.identity import Role, server_name
from duplane.fabric.v1 import lease_pb2, lease_pb2_grpc, session_pb2

DENIED, UNAVAILABLE = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED

# The whole table: rpc -> who may call it. An edge may make the last ones only for an operator.
SCHEDULER_RPCS = {
    "/duplane.fabric.v1.LeaseService/AcquireLease": "edge client",
    "/duplane.fabric.v1.LeaseService/ReleaseLease": "edge client operator",
    "/duplane.fabric.v1.RegistryService/Attach": "worker",
    "/duplane.fabric.v1.AdminService/ListWorkers": "edge operator",
    "/duplane.fabric.v1.AdminService/ListLeases": "edge operator",
    "/duplane.fabric.v1.AdminService/ListTickets": "edge operator",
    "/duplane.fabric.v1.AdminService/Watch": "edge operator",
    "/duplane.fabric.v1.AdminService/GetEstimates": "edge operator",
    "/duplane.fabric.v1.AdminService/DrainWorker": "operator",
    "/duplane.fabric.v1.AdminService/UndrainWorker": "operator",
    "/duplane.fabric.v1.AdminService/CancelTicket": "operator",
    "/duplane.fabric.v1.AdminService/EndSession": "operator",
    "/duplane.fabric.v1.AdminService/UpdateEstimates": "operator",
}
WORKER_RPCS = {
    "/duplane.fabric.v1.SessionService/Converse": "edge client",
    "/duplane.fabric.v1.SessionService/TakeOver": "edge",
    "/duplane.fabric.v1.SessionService/Chat": "edge client",
}
HEALTH_RPCS = {
    "/grpc.health.v1.Health/Check": "scheduler worker edge operator client",
    "/grpc.health.v1.Health/Watch": "scheduler worker edge operator client",
}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
FOR_OPERATORS = [rpc for rpc, roles in SCHEDULER_RPCS.items() if roles == "operator"]


@pytest.fixture
def certificates(tmp_path: Path) -> FabricCertificates:
    return FabricCertificates(tmp_path / "certificates")


@pytest.fixture
async def fabric(
    certificates: FabricCertificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[TlsFabric]:
    monkeypatch.setattr(watched_files, "CHECK_INTERVAL_S", 0.02)
    deny = tmp_path / "deny"
    deny.write_text("# nobody\n")
    async with tls_fabric(certificates, deny=deny) as running:
        yield running


async def status_of(
    channel: grpc.aio.Channel, rpc: str, metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.StatusCode:
    """Call any rpc with an empty message, and return how it ends; OK once it has answered."""
    # A call with one request, also of rpcs that take several: gRPC sends it in one step, so that no
    # send can fail after a refusal.
    call = channel.unary_stream(rpc)(b"", metadata=metadata)
    try:
        async with asyncio.timeout(WITHIN_S):
            if await call.read() is not grpc.aio.EOF:
                return grpc.StatusCode.OK
            return await call.code()
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()


def each_server(fabric: TlsFabric) -> list[tuple[Role, str, dict[str, str]]]:
    return [
        (Role.SCHEDULER, fabric.scheduler.address, {**SCHEDULER_RPCS, **HEALTH_RPCS}),
        (Role.WORKER, fabric.worker_address, {**WORKER_RPCS, **HEALTH_RPCS}),
    ]


async def test_each_role_calls_exactly_what_the_table_allows(
    certificates: FabricCertificates, fabric: TlsFabric
) -> None:
    for server, address, rpcs in each_server(fabric):
        for role in Role:
            async with open_channel(address, server, certificates.credentials(role)) as channel:
                for rpc, allowed in rpcs.items():
                    status = await status_of(channel, rpc)
                    assert (status is not DENIED) == (role in allowed.split()), (role, rpc)
                    assert status not in (UNAVAILABLE, UNIMPLEMENTED), (role, rpc)
                assert await status_of(channel, REFLECTION) is UNIMPLEMENTED


async def test_edge_acts_only_for_a_named_operator(
    certificates: FabricCertificates, fabric: TlsFabric, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    edge, client = certificates.credentials(Role.EDGE), certificates.credentials(Role.CLIENT)
    named = ((OPERATOR_KEY, "alice\\n{}"),)
    address = fabric.scheduler.address
    for rpc in FOR_OPERATORS:
        async with open_channel(address, Role.SCHEDULER, edge) as channel:
            assert await status_of(channel, rpc) is DENIED
            caplog.clear()
            assert await status_of(channel, rpc, named) is not DENIED
            (line,) = (one for one in caplog.records if one.name == "duplane.audit")
            assert str(edge.identity) in line.getMessage()
            assert "alice" in line.getMessage()
        async with open_channel(address, Role.SCHEDULER, client) as channel:
            assert await status_of(channel, rpc, named) is DENIED


async def refused_everywhere(
    fabric: TlsFabric, credentials: grpc.ChannelCredentials | None, expected: grpc.StatusCode
) -> None:
    for server, address, rpcs in each_server(fabric):
        options = [("grpc.ssl_target_name_override", server_name(server))]
        channel = (
            grpc.aio.secure_channel(address, credentials, options=options)
            if credentials
            else grpc.aio.insecure_channel(address)
        )
        async with channel:
            for rpc in rpcs:
                assert await status_of(channel, rpc) is expected, rpc


async def test_strangers_reach_no_rpc(
    certificates: FabricCertificates, fabric: TlsFabric, tmp_path: Path
) -> None:
    ca = certificates.bundle

    def of(directory: Path) -> grpc.ChannelCredentials:
        files = read_files(directory)
        return grpc.ssl_channel_credentials(ca, files.key_pem, files.chain_pem)

    foreign = FabricCertificates(tmp_path / "foreign")
    past = datetime.now(UTC) - timedelta(days=2)
    await refused_everywhere(fabric, None, UNAVAILABLE)
    await refused_everywhere(fabric, grpc.ssl_channel_credentials(ca), UNAVAILABLE)
    await refused_everywhere(fabric, of(foreign.issue(Role.EDGE)), UNAVAILABLE)
    expired = certificates.issue(Role.EDGE, "expired", now=past, life=timedelta(days=1))
    await refused_everywhere(fabric, of(expired), UNAVAILABLE)
    other_domain = certificates.issue(Role.EDGE, "other", trust_domain="elsewhere")
    await refused_everywhere(fabric, of(other_domain), DENIED)


async def test_certificate_that_names_no_process_or_two_is_refused(
    certificates: FabricCertificates, fabric: TlsFabric
) -> None:
    ca = certificates.authority
    for uris in (
        [],
        ["spiffe://duplane.internal/other/edge/n"],
        ["spiffe://duplane.internal/duplane/root/n"],
        [
            "spiffe://duplane.internal/duplane/edge/n",
            "spiffe://duplane.internal/duplane/operator/n",
        ],
    ):
        names = [
            *(x509.UniformResourceIdentifier(uri) for uri in uris),
            x509.DNSName(server_name(Role.EDGE)),
        ]
        chain, key = ca.sign(names, "duplane-edge", LIFE)
        credentials = grpc.ssl_channel_credentials(certificates.bundle, key, chain)
        await refused_everywhere(fabric, credentials, DENIED)


async def test_process_cannot_pass_for_a_server_of_another_role(
    certificates: FabricCertificates, caplog: pytest.LogCaptureFixture
) -> None:
    """A stolen edge's certificate does not let its thief take the place of a worker."""
    edge = certificates.credentials(Role.EDGE)
    server = FabricServer(credentials=edge)
    address = await server.start("127.0.0.1:0")
    try:
        pool = ChannelPool(Role.WORKER, certificates.credentials(Role.CLIENT))
        checks = HealthChecks(pool)
        for _ in range(3):
            assert not await checks.answers(address, WITHIN_S)
        await pool.close()
        named = [one.getMessage() for one in caplog.records if "TLS to worker" in one.getMessage()]
        assert len(named) == 1
        assert address in named[0]
    finally:
        await server.stop(0)


async def test_process_without_tls_learns_which_flag_it_may_lack(
    fabric: TlsFabric, caplog: pytest.LogCaptureFixture
) -> None:
    address = fabric.scheduler.address
    pool = ChannelPool(Role.SCHEDULER)
    checks = HealthChecks(pool)
    for _ in range(3):
        assert not await checks.answers(address, WITHIN_S)
    await pool.close()
    (line,) = (one.getMessage() for one in caplog.records if address in one.getMessage())
    assert "--fabric-tls" in line


async def test_worker_registers_only_under_its_own_name(
    certificates: FabricCertificates, fabric: TlsFabric
) -> None:
    thief = certificates.credentials(Role.WORKER, "thief")
    async with open_channel(fabric.scheduler.address, Role.SCHEDULER, thief) as channel:
        for worker_id in (f"{NAME}-1", NAME, "thiefling", ""):
            worker = FakeWorker(channel, register_message(worker_id))
            with pytest.raises(FabricError) as refused:
                await worker.attach()
            assert refused.value.reason in (Reason.NOT_ALLOWED, Reason.INVALID_FIELD)
        for worker_id in ("thief", "thief-2"):
            worker = FakeWorker(channel, register_message(worker_id))
            await worker.attach()
            await worker.vanish()


async def test_lease_and_request_of_another_process_are_of_no_use(
    certificates: FabricCertificates, fabric: TlsFabric
) -> None:
    """A lease is no bearer token: a thief who has read one cannot claim it or give it back."""
    at = [fabric.scheduler.address]
    wish = lease_pb2.AcquireLeaseRequest(request_id="same", kind=AUDIO)
    owner, thief = certificates.credentials(Role.CLIENT), certificates.credentials(Role.EDGE)
    operator = certificates.credentials(Role.OPERATOR)
    async with FabricClient(at, owner) as client, FabricClient(at, thief) as other:
        granted = await client.acquire(wish)
        with pytest.raises(FabricError) as refused:
            async with other.converse(granted):
                pass
        assert refused.value.reason is Reason.NOT_ALLOWED
        chat = await client.acquire(
            lease_pb2.AcquireLeaseRequest(request_id="chat", kind=lease_pb2.SESSION_KIND_CHAT)
        )
        async with other.chat(chat, session_pb2.ChatRequest()) as responses:
            with pytest.raises(FabricError) as refused:
                await anext(responses)
        assert refused.value.reason is Reason.NOT_ALLOWED
        await other.release(granted.lease_id)
        assert (await other.acquire(wish)).lease_id != granted.lease_id
        async with client.converse(granted) as stream:
            await stream.open(session_pb2.Open())
            release = lease_pb2.ReleaseLeaseRequest(lease_id=granted.lease_id)
            async with open_channel(at[0], Role.SCHEDULER, operator) as channel:
                await lease_pb2_grpc.LeaseServiceStub(channel).ReleaseLease(release)
            closed = (await asyncio.wait_for(stream.read(), WITHIN_S)).closed
            assert closed.reason == session_pb2.CLOSE_REASON_REVOKED


async def is_denied(channel: grpc.aio.Channel, rpc: str) -> bool:
    return await status_of(channel, rpc) is DENIED


def entry(credentials: FabricCredentials, *, is_fingerprint: bool) -> str:
    if is_fingerprint:
        return fingerprint(read_files(credentials.directory).leaf).upper().replace("SHA", "sha")
    return f"{credentials.identity}  # stolen"


@pytest.mark.parametrize("is_fingerprint", [False, True])
async def test_denied_certificate_loses_its_running_calls_and_makes_no_more(
    certificates: FabricCertificates, fabric: TlsFabric, tmp_path: Path, is_fingerprint: bool
) -> None:
    stolen = certificates.credentials(Role.CLIENT, "stolen")
    wish = lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO)
    witness = certificates.credentials(Role.CLIENT)
    async with (
        FabricClient([fabric.scheduler.address], stolen) as thief,
        FabricClient([fabric.scheduler.address], witness) as client,
        thief.session(wish) as stream,
        client.session(lease_pb2.AcquireLeaseRequest(request_id="w", kind=AUDIO)) as running,
    ):
        await stream.open(session_pb2.Open())
        await running.open(session_pb2.Open())
        (tmp_path / "deny").write_text(entry(stolen, is_fingerprint=is_fingerprint))
        with pytest.raises(FabricError) as ended:
            await asyncio.wait_for(stream.read(), WITHIN_S)
        assert ended.value.reason is Reason.NOT_ALLOWED
        for server, address, rpcs in each_server(fabric):
            async with open_channel(address, server, stolen) as channel:
                for rpc in rpcs:
                    await until(lambda rpc=rpc, to=channel: is_denied(to, rpc), WITHIN_S)
        with pytest.raises(FabricError) as refused:
            await thief.acquire(lease_pb2.AcquireLeaseRequest(request_id="again", kind=AUDIO))
        assert refused.value.reason is Reason.NOT_ALLOWED
        await running.close()
        assert (await asyncio.wait_for(running.read(), WITHIN_S)).HasField("closed")
