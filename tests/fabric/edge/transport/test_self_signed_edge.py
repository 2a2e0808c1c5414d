"""An edge that makes its certificate itself, before clients that trust its CA."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from support.edge.live_edge import begin, end, live_edge
from websockets.asyncio.client import connect

from duplane.edge.transport.self_signed import LEAF_LIFE
from duplane.fabric.tls.issuing import Authority


def trusting(ca: bytes) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=ca.decode())


async def test_browser_that_installed_the_ca_talks_over_tls(tmp_path: Path) -> None:
    async with live_edge(tls_self_signed=True, tls_state=tmp_path) as edge:
        port = edge.edge.address.rpartition(":")[2]
        async with aiohttp.ClientSession() as client:
            address = f"https://localhost:{port}/ca.pem"
            async with client.get(address, ssl=False) as answer:  # nothing to trust yet
                ca = await answer.read()
                assert answer.content_type == "application/x-x509-ca-cert"
                assert "Strict-Transport-Security" not in answer.headers
            tls = trusting(ca)
            async with client.get(f"https://localhost:{port}/", ssl=tls) as answer:
                assert answer.status == 200
        for host in ("localhost", "127.0.0.1"):
            url = f"wss://{host}:{port}/v1/realtime?mode=audio"
            async with connect(url, ssl=tls, proxy=None) as socket:
                await begin(socket)
                await end(socket)
    assert b"PRIVATE" not in ca


async def test_stolen_ca_cannot_vouch_for_another_site(tmp_path: Path) -> None:
    async with live_edge(tls_self_signed=True, tls_state=tmp_path):
        authority = Authority.load(tmp_path)
    chain, key = authority.sign([x509.DNSName("bank.example")], "bank", LEAF_LIFE)
    files = tmp_path / "bank.pem"
    files.write_bytes(key + chain)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(files)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    bank = server.wrap_bio(outgoing, incoming, server_side=True)
    victim = trusting(authority.pem).wrap_bio(incoming, outgoing, server_hostname="bank.example")
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
        shake_hands(victim, bank)


def shake_hands(*sides: ssl.SSLObject) -> None:
    """Let two sides of a connection in memory read and write until both are done."""
    waiting = list(sides)
    while waiting:
        for side in tuple(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                waiting.remove(side)


async def test_edge_without_it_has_no_ca() -> None:
    async with live_edge() as edge:
        assert (await edge.get("/ca.pem"))[0] == 404
