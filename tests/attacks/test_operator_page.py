"""What strangers, tenants and pages of other sites try at the door of the operator page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.edge.callers import NamedCallers, as_caller
from support.edge.credential_rig import KeyStore, bearer
from support.edge.live_edge import live_edge
from support.edge.watched_stream import WATCH_PATH

from duplane.edge.credentials.settings import CredentialSettings

DRAIN = "/api/admin/workers/w/drain"
EVIL = "https://evil.example"


async def status(address: str, method: str, path: str, **request: Any) -> int:
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, f"http://{address}{path}", **request) as answer,
    ):
        return answer.status


@pytest.mark.parametrize(
    "headers",
    [{"Origin": EVIL}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
    ids=["origin", "null", "cross-site"],
)
async def test_page_of_another_site_reads_no_stream_and_drains_nothing(
    headers: dict[str, str],
) -> None:
    """Without keys, a browser on the edge's own machine acts as an operator."""
    async with live_edge() as live:
        address = live.edge.address
        assert await status(address, "GET", WATCH_PATH) == 200
        assert await status(address, "GET", WATCH_PATH, headers=headers) == 403
        assert await status(address, "POST", DRAIN, headers=headers, json={}) == 403
        assert await status(address, "DELETE", DRAIN, headers=headers) == 403


async def test_form_of_a_page_drains_nothing() -> None:
    async with live_edge() as live:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            headers = {"Content-Type": kind}
            code = await status(live.edge.address, "POST", DRAIN, headers=headers, data=b"{}")
            assert code == 415, kind


async def test_key_of_an_operator_works_in_its_header_only(tmp_path: Path) -> None:
    """A URL with a key would be in histories and logs, and a cookie would be sent by itself."""
    operators = KeyStore(tmp_path, "operators.toml", head="")
    key = operators.add('operator = "ann"\nscopes = ["read", "drain"]').text
    tenants = KeyStore(tmp_path)
    tenants.new()
    for api_keys in (None, tenants.path):
        credentials = CredentialSettings(operator_keys=operators.path, api_keys=api_keys)
        async with live_edge(credentials=credentials) as live:
            address = live.edge.address
            assert await status(address, "GET", WATCH_PATH, headers=bearer(key)) == 200
            cookie = {"Cookie": f"__Host-duplane={key}", "Origin": f"http://{address}"}
            for path, headers in [
                (f"{WATCH_PATH}?token={key}", {}),
                (f"{WATCH_PATH}?api_key={key}", {}),
                (WATCH_PATH, cookie),
                (WATCH_PATH, {"Sec-WebSocket-Protocol": f"duplane.bearer.{key}"}),
            ]:
                code = await status(address, "GET", path, headers=headers)
                # 400: the edge has keys of tenants, and a key may not be in the URL.
                assert code in (400, 401, 403), (path, headers)


async def test_answers_of_the_stream_are_stored_nowhere() -> None:
    async with (
        live_edge() as live,
        aiohttp.ClientSession() as client,
        client.get(f"http://{live.edge.address}{WATCH_PATH}") as answer,
    ):
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("name", ["tenant", "drain", "recordings", "sessions", "voices"])
async def test_stream_needs_the_scope_that_reads(name: str) -> None:
    async with live_edge(authenticator=NamedCallers()) as live:
        assert await status(live.edge.address, "GET", WATCH_PATH, headers=as_caller(name)) == 403


async def test_page_exists_on_the_port_of_operators_only() -> None:
    async with live_edge(operator_listen="127.0.0.1:0") as live:
        edge = live.edge
        for path in ("/operator", "/pages/operator/operator.js", WATCH_PATH, DRAIN):
            assert await status(edge.address, "GET", path) == 404, path
        assert await status(edge.operator_address, "GET", "/operator") == 200
        assert await status(edge.address, "GET", "/") == 200
