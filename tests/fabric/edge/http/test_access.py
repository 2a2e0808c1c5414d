"""Limits of clients without a credential, and the audit log of operators."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.certificates import write_certificate
from support.edge.callers import NamedCallers, as_caller
from support.edge.live_edge import LiveEdge, begin, closed, live_edge, receive
from support.edge.raw_client import RawClient
from websockets.asyncio.client import connect

from duplane.edge.settings import Limits

PROXY = ("127.0.0.1",)


def connect_as(edge: LiveEdge, address: str, name: str = "") -> connect:
    headers = {"X-Forwarded-For": address, **as_caller(name)}
    return connect(edge.url(), compression=None, proxy=None, additional_headers=headers)


async def is_refused(edge: LiveEdge, address: str) -> bool:
    async with connect_as(edge, address) as client:
        event = await receive(client)
        if event["type"] != "error":
            return False
        assert event["error"]["message"] == "too many sessions of one client"
        await closed(client, 1013)
        return True


async def test_an_address_without_a_credential_has_four_sessions() -> None:
    async with (
        live_edge(slot_count=6, trusted_proxies=PROXY) as edge,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(4):
            await begin(await stack.enter_async_context(connect_as(edge, "198.51.100.1")))
        assert await is_refused(edge, "198.51.100.1")
        assert not await is_refused(edge, "198.51.100.2")


@pytest.mark.parametrize("is_local", [False, True], ids=["tenant", "this machine"])
async def test_sessions_of_tenants_and_of_this_machine_are_not_counted_by_address(
    is_local: bool,
) -> None:
    known: dict[str, Any] = {"authenticator": NamedCallers(), "trusted_proxies": PROXY}
    settings = {} if is_local else known
    async with live_edge(slot_count=6, **settings) as edge, contextlib.AsyncExitStack() as stack:
        for _ in range(6):
            opened = edge.connect() if is_local else connect_as(edge, "198.51.100.1", "tenant")
            await begin(await stack.enter_async_context(opened))


async def test_requests_of_an_address_above_the_rate_get_429() -> None:
    limits = replace(Limits(), client_requests_per_s=0.5)  # in bursts of two
    headers = {"X-Forwarded-For": "198.51.100.1"}
    async with live_edge(limits, trusted_proxies=PROXY) as edge, edge.asked() as http:
        for path in ("/status", "/nowhere"):
            assert (await http.ask("GET", path, headers=headers))[0] != 429
        for path in ("/status", "/nowhere", "/v1/realtime"):
            code, told = await http.ask("GET", path, headers=headers)
            assert (code, told["detail"]) == (429, "too many requests of this address")
        other = {"X-Forwarded-For": "198.51.100.2"}
        assert (await http.ask("GET", "/status", headers=other))[0] == 200


async def test_refusal_names_the_time_to_wait() -> None:
    limits = replace(Limits(), client_requests_per_s=0.2)
    async with live_edge(limits, trusted_proxies=PROXY) as edge, edge.asked() as http:
        assert (await http.ask("GET", "/nowhere"))[0] == 404
        async with http.client.get(f"http://{http.address}/status") as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "5")


async def test_requests_with_a_credential_are_not_counted_by_address() -> None:
    limits = replace(Limits(), client_requests_per_s=0.2)
    async with (
        live_edge(limits, trusted_proxies=PROXY, authenticator=NamedCallers()) as edge,
        edge.asked() as http,
    ):
        for _ in range(5):
            assert (await http.ask("GET", "/status", headers=as_caller("tenant")))[0] == 200
        codes = [(await http.ask("GET", "/status"))[0] for _ in range(3)]
        assert codes == [401, 429, 429]


async def test_each_action_of_an_operator_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="duplane.audit")
    async with live_edge(authenticator=NamedCallers()) as edge, edge.asked() as http:
        path = "/api/sessions/sess_%0akind=x"
        for name, code in (("sessions", 404), ("read", 403), ("tenant", 403), ("", 401)):
            headers = as_caller(name)
            assert (await http.ask("DELETE", f"{path}?secret", headers=headers))[0] == code
        assert (await http.ask("GET", "/workers", headers=as_caller("read")))[0] == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "duplane.audit"]
    action = r"method=DELETE route=/api/sessions/{session} session='sess_\nkind=x' status="
    assert lines == [
        f"kind=operator credential='sessions' tenant='' address=127.0.0.1 {action}404",
        f"kind=operator credential='read' tenant='' address=127.0.0.1 {action}403",
        f"kind=tenant credential='k1' tenant='acme' address=127.0.0.1 {action}403",
    ]


async def test_audit_log_shortens_addresses_as_other_lines_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="duplane.audit")
    settings: dict[str, Any] = {"authenticator": NamedCallers(), "trusted_proxies": PROXY}
    headers = {**as_caller("operator"), "X-Forwarded-For": "198.51.100.77"}
    async with live_edge(**settings, log_addresses="short") as edge, edge.asked() as http:
        assert (await http.ask("GET", "/api/sessions", headers=headers))[0] == 200
    (line,) = [each.getMessage() for each in caplog.records if each.name == "duplane.audit"]
    assert " address=198.51.100.0/24 " in line


async def test_operators_of_this_machine_need_no_tls_and_no_free_connection(
    tmp_path: Path,
) -> None:
    chain, key = write_certificate(tmp_path, "edge")
    limits = replace(Limits(), connection_count=1)
    settings: dict[str, Any] = {"tls_cert": chain, "tls_key": key}
    async with (
        live_edge(limits, **settings, operator_listen="127.0.0.1:0") as edge,
        RawClient(edge.edge.address) as held,
        aiohttp.ClientSession() as client,
    ):
        await held.send(b"GET ")
        async with RawClient(edge.edge.address) as late:
            assert await late.read() == b""
        async with client.get(f"http://{edge.edge.operator_address}/workers") as answer:
            assert answer.status == 200
