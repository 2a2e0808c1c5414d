"""TLS at the edge, and a change of the certificate while the edge runs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from support.certificates import write_certificate
from support.edge.live_edge import LiveEdge, begin, end, exchange, live_edge
from support.time_limits import WITHIN_S
from websockets.asyncio.client import connect

from duplane.edge import server
from duplane.edge.server import Edge
from duplane.edge.settings import EdgeSettings, Limits
from duplane.edge.transport.tls import Certificate
from duplane.fabric import watched_files
from duplane.fabric.client import FabricClient
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.process import Shutdown, StartError

pytestmark = pytest.mark.timing


def served_name(address: str) -> str:
    """Return the name in the edge's certificate."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=WITHIN_S) as plain,
        untrusting().wrap_socket(plain) as secure,
    ):
        certificate = x509.load_der_x509_certificate(secure.getpeercert(True) or b"")
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def untrusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def connect_securely(edge: LiveEdge, chain: Path) -> connect:
    url = edge.url().replace("ws://", "wss://")
    trusting = ssl.create_default_context(cafile=chain)
    return connect(url, ssl=trusting, compression=None, max_size=None, proxy=None)


@pytest.fixture
async def reloaded() -> AsyncGenerator[asyncio.Event]:
    """Yield an event that is set once the edge has reloaded a certificate."""
    event = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.INFO:
                event.set()

    listener, log = Listener(), logging.getLogger(watched_files.__name__)
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    yield event
    log.setLevel(logging.NOTSET)
    log.removeHandler(listener)


async def test_websockets_and_http_are_served_over_tls(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, "edge")
    async with live_edge(tls_cert=chain, tls_key=key) as edge:
        async with connect_securely(edge, chain) as client:
            await begin(client)
            await exchange(client)
            await end(client)

        def ask() -> int:
            trusting = ssl.create_default_context(cafile=chain)
            url = f"https://{edge.edge.address}/health"
            with urllib.request.urlopen(url, timeout=WITHIN_S, context=trusting) as answer:
                return answer.status

        assert await asyncio.to_thread(ask) == 200


async def test_plain_and_old_clients_are_refused(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, "edge")
    async with live_edge(tls_cert=chain, tls_key=key) as edge:
        host, _, port = edge.edge.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), WITHIN_S)
        writer.close()
        old = untrusting()
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.minimum_version, old.maximum_version = (
                ssl.TLSVersion.TLSv1,
                ssl.TLSVersion.TLSv1_1,
            )
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection(host, int(port), ssl=old)
        new = untrusting()
        new.maximum_version = ssl.TLSVersion.TLSv1_2
        _, writer = await asyncio.open_connection(host, int(port), ssl=new)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
        writer.close()


async def test_client_that_stops_in_the_middle_of_the_tls_handshake_is_cut(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, "edge")
    limits = Limits(client_s=1.0, close_s=0.3)
    async with live_edge(limits, tls_cert=chain, tls_key=key) as edge:
        host, _, port = edge.edge.address.rpartition(":")
        hello = ssl.MemoryBIO()
        client = untrusting().wrap_bio(ssl.MemoryBIO(), hello)
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        async with connect_securely(edge, chain) as witness:
            await begin(witness)
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(hello.read()[:100])
            await exchange(witness)
            assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
            writer.close()
            await exchange(witness)
            await end(witness)


async def test_new_certificate_is_served_and_running_sessions_go_on(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, "first")
    async with live_edge(tls_cert=chain, tls_key=key) as edge:
        assert edge.edge.certificate
        async with connect_securely(edge, chain) as client:
            await begin(client)
            assert await asyncio.to_thread(served_name, edge.edge.address) == "first"
            write_certificate(tmp_path, "second", is_rsa=True)
            assert edge.edge.certificate.reload_if_changed()
            assert await asyncio.to_thread(served_name, edge.edge.address) == "second"
            await exchange(client)
            await end(client)


async def test_files_are_followed(tmp_path: Path, reloaded: asyncio.Event) -> None:
    certificate = Certificate(*write_certificate(tmp_path, "first"))
    async with watched_files.watching((certificate,), interval_s=0.01):
        before = certificate.current
        write_certificate(tmp_path, "second")
        await asyncio.wait_for(reloaded.wait(), WITHIN_S)
        assert certificate.current is not before


def test_files_that_do_not_fit_leave_the_old_certificate(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, "first")
    certificate = Certificate(chain, key)
    first, first_key = certificate.current, key.read_bytes()
    assert not certificate.reload_if_changed()
    write_certificate(tmp_path, "second")
    second_key = key.read_bytes()
    key.write_bytes(first_key)  # the moment between the replacements of the two files
    assert not certificate.reload_if_changed()
    assert not certificate.reload_if_changed()
    key.unlink()
    assert not certificate.reload_if_changed()
    assert certificate.current is first
    key.write_bytes(second_key)
    assert certificate.reload_if_changed()
    assert certificate.current is not first


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, "edge")
    with pytest.raises(ValueError, match=r"missing\.pem"):
        Certificate(chain, tmp_path / "missing.pem")
    with pytest.raises(ValueError, match="tls_cert"):
        Certificate(key, key)
    with pytest.raises(ValueError, match="together"):
        EdgeSettings(tls_cert=chain)


async def test_edge_that_cannot_start_says_why(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, "edge")
    async with live_edge() as edge, FabricClient(["127.0.0.1:1"]) as fabric:
        for settings, names in (
            (EdgeSettings(tls_cert=key, tls_key=chain), "tls_cert"),
            (EdgeSettings(default_voice=key), r"key\.pem"),
            (EdgeSettings(listen=edge.edge.address), edge.edge.address),
        ):
            with pytest.raises(StartError, match=names):
                async with Edge.listening(settings, fabric, Telemetry("edge")):
                    pass


async def test_hangup_signal_reads_the_certificate_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reloaded: asyncio.Event
) -> None:
    chain, key = write_certificate(tmp_path, "first")
    announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(server, "announce", lambda _, address: announced.set_result(address))
    settings = EdgeSettings(
        listen="127.0.0.1:0", schedulers=("127.0.0.1:1",), tls_cert=chain, tls_key=key
    )
    shutdown = Shutdown()
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(settings, shutdown))
        address = await announced
        write_certificate(tmp_path, "second")
        os.kill(os.getpid(), signal.SIGHUP)
        await reloaded.wait()
        assert await asyncio.to_thread(served_name, address) == "second"
        shutdown.drain()
        await serving
