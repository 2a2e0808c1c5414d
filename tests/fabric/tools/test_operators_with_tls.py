"""`duplane status`, `drain` and `trace` in a fabric with mutual TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.fabric.tls_fabric import NAME, FabricCertificates, tls_fabric
from support.tools.command import run_command

from duplane.fabric.channel import open_channel
from duplane.fabric.tls.identity import Role
from duplane.tools.trace.receiver import receiving
from duplane.tools.trace.units import Collected

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


async def run(*arguments: str) -> tuple[int, str]:
    return await asyncio.to_thread(run_command, *arguments)


async def test_operators_need_a_certificate_of_their_role(tmp_path: Path) -> None:
    certificates = FabricCertificates(tmp_path)
    operator = ("--fabric-tls", str(certificates.issue(Role.OPERATOR, "alice")))
    async with tls_fabric(certificates) as fabric:
        at = ("--scheduler", fabric.scheduler.address)
        code, output = await run("status", *at, *operator)
        assert code == 0, output
        assert f"{NAME}-1" in output
        code, output = await run("status", *at)
        assert code == 1
        assert "no scheduler answers" in output
        worker = ("--fabric-tls", str(certificates.issue(Role.WORKER, "thief")))
        code, output = await run("status", *at, *worker)
        assert code == 2
        assert "must be for operator" in output
        code, output = await run("drain", f"{NAME}-1", "--wait", *at, *operator)
        assert code == 0, output
        assert "has no session" in output
        code, output = await run("drain", f"{NAME}-1", "--undo", *at, *operator)
        assert code == 0, output


async def test_operator_of_another_ca_is_told_that_tls_fails(tmp_path: Path) -> None:
    certificates = FabricCertificates(tmp_path / "ours")
    foreign = FabricCertificates(tmp_path / "foreign").issue(Role.OPERATOR)
    async with tls_fabric(certificates) as fabric:
        at = ("--scheduler", fabric.scheduler.address)
        code, output = await run("status", *at, "--fabric-tls", str(foreign))
    assert code == 1
    assert "TLS fails" in output


async def test_trace_takes_spans_only_from_processes_of_the_fabric(tmp_path: Path) -> None:
    certificates = FabricCertificates(tmp_path)
    foreign = FabricCertificates(tmp_path / "foreign").credentials(Role.EDGE)
    request = ExportTraceServiceRequest().SerializeToString()
    credentials = certificates.credentials(Role.OPERATOR)
    async with receiving("127.0.0.1:0", Collected(10), None, credentials) as address:
        edge = certificates.credentials(Role.EDGE)
        async with open_channel(str(address), Role.OPERATOR, edge) as channel:
            assert await channel.unary_unary(EXPORT)(request) == b""
        for stranger in (foreign, None):
            async with open_channel(str(address), Role.OPERATOR, stranger) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(EXPORT)(request)
