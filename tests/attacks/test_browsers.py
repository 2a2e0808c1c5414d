"""What pages of other origins try through the browser of somebody who can reach the edge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.certificates import write_certificate
from support.edge.live_edge import LiveEdge, begin, end, live_edge
from support.edge.raw_client import RawClient
from websockets.asyncio.client import connect

WEBSOCKETS = (
    *("/v1/realtime", "/v1/realtime?mode=chat", "/ws/duplex/adx_1"),
    *("/ws/chat", "/ws/half_duplex/hd_1"),
    *("/v1/live/sessions", "/openai/v1/live/sessions", "/openai/v1/realtime", "/realtime"),
)
EVIL = "https://evil.example"
FOREIGN = (EVIL, "null", "", "file://", "http://localhost", "https://localhost:1", "x", "http://[")
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Origin": EVIL}


async def ask(
    edge: LiveEdge, method: str, path: str, headers: Mapping[str, str], **body: Any
) -> tuple[int, str, Mapping[str, str]]:
    """Send a request; return status, text and headers of the answer."""
    url = f"http://{edge.edge.address}{path}"
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, url, headers=headers, **body) as answer,
    ):
        return answer.status, await answer.text(), answer.headers


async def refusal_of_upgrade(edge: LiveEdge, path: str, headers: Mapping[str, str]) -> str:
    """Open a WebSocket, which must fail with 403; return the text of the answer."""
    code, text, _ = await ask(edge, "GET", path, {**UPGRADE, **headers})
    assert code == 403
    return text


async def test_page_of_another_origin_opens_no_websocket() -> None:
    async with live_edge() as edge:
        for path in WEBSOCKETS:
            for origin in FOREIGN:
                told = await refusal_of_upgrade(edge, path, {"Origin": origin})
                assert "--allowed-origins" in told
        assert edge.fabric.acquisitions.empty()


async def test_page_of_another_origin_reaches_no_route() -> None:
    async with live_edge() as edge:
        for route in edge.edge.routes:
            path = route.path.replace("{", "").replace("}", "")
            code, told, headers = await ask(edge, route.method, path, {"Origin": EVIL})
            assert (code, "--allowed-origins" in told) == (403, True), path
            assert "Access-Control-Allow-Origin" not in headers
        assert edge.fabric.acquisitions.empty()


@pytest.mark.parametrize("mode", ["no-cors", "navigate", "websocket"])
async def test_cross_site_requests_without_an_origin_are_refused(mode: str) -> None:
    """Browsers send no origin with pictures, scripts and links of other sites."""
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
    async with live_edge() as edge:
        for path in ("/status", "/workers", "/api/default_ref_audio"):
            assert (await ask(edge, "GET", path, headers))[0] == 403
        assert (await ask(edge, "GET", "/status", {"Sec-Fetch-Site": "none"}))[0] == 200
        own = {"Sec-Fetch-Site": "same-origin"}
        assert (await ask(edge, "GET", "/status", own))[0] == 200


async def test_links_of_other_sites_open_pages_and_nothing_else() -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    async with live_edge() as edge, aiohttp.ClientSession() as client:

        async def open_link(path: str, kind: str, **more: str) -> int:
            asked = client.get(
                f"http://{edge.edge.address}{path}",
                headers={**headers, "Sec-Fetch-Dest": kind, **more},
            )
            async with asked as answer:
                return answer.status

        assert await open_link("/", "document") == 200
        assert await open_link("/", "document", Host="evil.example") == 403
        assert await open_link("/", "iframe") == 403
        assert await open_link("/pages/client/index.js", "script") == 403
        assert await open_link("/status", "document") == 403


async def test_own_pages_and_programs_are_served() -> None:
    async with live_edge() as edge:
        port = edge.edge.address.rpartition(":")[2]
        for headers in (
            {},
            {"Origin": f"http://{edge.edge.address}"},
            {"Origin": f"https://{edge.edge.address}"},  # a proxy may speak TLS with the client
        ):
            async with connect(edge.url(), proxy=None, additional_headers=headers) as client:
                await begin(client)
                await end(client)
            await edge.settled()
        own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
        assert (await ask(edge, "GET", "/workers", own))[0] == 200


async def test_listed_origin_is_served_and_may_read_answers() -> None:
    page = "https://pages.example"
    async with live_edge(allowed_origins=(page, "http://localhost:3000")) as edge:
        own = {"Origin": page, "Sec-Fetch-Site": "cross-site"}
        async with connect(edge.url(), proxy=None, additional_headers=own) as client:
            await begin(client)
            await end(client)
        code, _, headers = await ask(edge, "GET", "/status", own)
        assert (code, headers["Access-Control-Allow-Origin"]) == (200, page)
        assert headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in headers
        code, _, headers = await ask(edge, "GET", "/nowhere", own)  # the page can read why
        assert (code, headers["Access-Control-Allow-Origin"]) == (404, page)
        code, _, headers = await ask(edge, "OPTIONS", "/api/chat", {**PREFLIGHT, **own})
        assert (code, headers["Access-Control-Allow-Origin"]) == (204, page)
        assert "POST" in headers["Access-Control-Allow-Methods"]
        allowed = headers["Access-Control-Allow-Headers"].lower().split(", ")
        assert {"authorization", "x-stainless-lang", "openai-organization"} <= set(allowed)
        assert "x-forwarded-for" not in allowed
        for origin in (*FOREIGN, "https://pages.example:444", "http://pages.example", f"{page}.x"):
            assert (await ask(edge, "GET", "/status", {"Origin": origin}))[0] == 403


async def test_preflight_of_another_origin_allows_nothing() -> None:
    async with live_edge() as edge:
        code, _, headers = await ask(edge, "OPTIONS", "/api/chat", PREFLIGHT)
        assert code == 403
        assert not [name for name in headers if name.startswith("Access-Control")]


async def test_star_allows_all_origins_as_earlier_versions_did() -> None:
    async with live_edge(allowed_origins=("*",)) as edge:
        for origin in (EVIL, "null"):
            headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
            assert (await ask(edge, "GET", "/status", headers))[0] == 200
            # Only requests for this machine from this machine are those of an operator.
            assert (await ask(edge, "GET", "/workers", headers))[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.x", "a b"]
)
async def test_name_that_was_made_to_resolve_to_the_edge_reaches_nothing(host: str) -> None:
    """DNS rebinding: the browser takes the edge for the page's own server."""
    async with live_edge() as edge:
        port = edge.edge.address.rpartition(":")[2]
        name = host.format(port=port)
        headers = {"Host": name, "Origin": f"http://{name}", "Sec-Fetch-Site": "same-origin"}
        for path in ("/status", "/workers", "/health", "/nowhere"):
            code, told, _ = await ask(edge, "GET", path, headers)
            assert (code, "--allowed-hosts" in told) == (403, True)
        told = await refusal_of_upgrade(edge, "/v1/realtime", headers)
        assert "--allowed-hosts" in told


async def test_names_of_settings_and_certificate_are_served(tmp_path: Path) -> None:
    names = ("voice.example", "*.wild.example")
    chain, key = write_certificate(tmp_path, "edge", host_names=names)
    async with live_edge(allowed_hosts=("set.example",), tls_cert=chain, tls_key=key) as edge:
        url = f"https://{edge.edge.address}/health"
        async with aiohttp.ClientSession() as client:

            async def code(host: str) -> int:
                async with client.get(url, headers={"Host": host}, ssl=False) as answer:
                    assert answer.headers["Strict-Transport-Security"].startswith("max-age=")
                    return answer.status

            for host in ("voice.example", "VOICE.example:443", "a.wild.example", "set.example:1"):
                assert await code(host) == 200, host
            for host in ("wild.example", "a.b.wild.example", "evil.example", "xvoice.example"):
                assert await code(host) == 403, host
            write_certificate(tmp_path, "edge", host_names=("new.example",))
            assert await code("new.example") == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
async def test_bodies_that_need_no_preflight_change_nothing(kind: str) -> None:
    async with live_edge() as edge:
        for method, path in (("POST", "/api/chat"), ("PUT", "/api/config/eta")):
            body = b'{"messages":[{"role":"user","content":"Hi"}]}'
            lines = [f"{method} {path} HTTP/1.1", f"Host: {edge.edge.address}"]
            lines += [f"Content-Type: {kind}"] * bool(kind)
            lines += [f"Content-Length: {len(body)}", "", ""]
            async with RawClient(edge.edge.address) as client:
                await client.send("\r\n".join(lines).encode() + body)
                answer = await client.read_all()
            assert answer.startswith(b"HTTP/1.1 415 ")
            assert b"application/json" in answer
        assert edge.fabric.acquisitions.empty()


async def test_form_needs_a_credential_that_pages_cannot_send() -> None:
    path = "/api/sessions/x/upload-recording"
    headers = {"X-Forwarded-For": "198.51.100.1"}
    async with live_edge(admin_token="secret", trusted_proxies=("127.0.0.1",)) as edge:
        form = aiohttp.MultipartWriter("form-data")
        assert (await ask(edge, "POST", path, headers, data=form))[0] == 403
        form = aiohttp.MultipartWriter("form-data")
        token = {**headers, "Authorization": "Bearer secret"}
        assert (await ask(edge, "POST", path, token, data=form))[0] == 404


async def test_forwarded_host_is_believed_of_trusted_proxies_only() -> None:
    page = {"Host": "127.0.0.1:1", "Origin": "https://voice.example"}
    forwarded = {**page, "X-Forwarded-Host": "voice.example"}
    async with live_edge(allowed_hosts=("voice.example",)) as edge:
        assert (await ask(edge, "GET", "/status", forwarded))[0] == 403
    proxies = ("127.0.0.1",)
    async with live_edge(allowed_hosts=("voice.example",), trusted_proxies=proxies) as edge:
        assert (await ask(edge, "GET", "/status", forwarded))[0] == 200
        assert (await ask(edge, "GET", "/status", page))[0] == 403
        plain = {**forwarded, "X-Forwarded-Proto": "http"}
        assert (await ask(edge, "GET", "/status", plain))[0] == 403
    async with live_edge(trusted_proxies=proxies) as edge:
        assert "--allowed-hosts" in (await ask(edge, "GET", "/status", forwarded))[1]


async def test_answers_are_not_stored_and_not_guessed() -> None:
    async with live_edge() as edge:
        for path in ("/status", "/health", "/api/queue", "/nowhere", "/api/presets"):
            _, _, headers = await ask(edge, "GET", path, {})
            assert headers["Cache-Control"] == "no-store"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert "Strict-Transport-Security" not in headers


async def test_repeated_headers_are_refused() -> None:
    async with live_edge() as edge:
        own = f"http://{edge.edge.address}"
        for extra in (f"Origin: {own}\r\nOrigin: {EVIL}", f"Origin: {own}, {EVIL}", "Host: evil"):
            head = f"GET /status HTTP/1.1\r\nHost: {edge.edge.address}\r\n{extra}\r\n\r\n"
            async with RawClient(edge.edge.address) as client:
                await client.send(head.encode())
                assert (await client.read_all())[9:12] in (b"403", b"400")


async def test_operator_learns_of_refused_pages_and_the_log_stays_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with live_edge() as edge:
        for number in range(20):
            headers = {"Origin": f"https://page-{number}.example"}
            assert (await ask(edge, "GET", "/status", headers))[0] == 403
    (line,) = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert "https://page-0.example" in line
    assert "--allowed-origins" in line
