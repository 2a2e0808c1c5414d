"""What strangers try with API keys and ephemeral tokens, in each place of a request."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pybase64
import pytest
from support.edge.credential_rig import (
    KeyStore,
    answer,
    bearer,
    carriers,
    connected,
    make_token,
    refusal,
)
from support.edge.live_edge import HandSetClock, begin, end, exchange, live_edge
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection

from duplane.edge.credentials.keys import new_key
from duplane.edge.credentials.settings import CredentialSettings

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
WEBSOCKETS = (
    *("/v1/realtime?mode=audio", "/v1/realtime?mode=chat"),
    *("/ws/duplex/adx_1", "/ws/half_duplex/hd_1", "/ws/chat"),
)


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path)


def keyed(store: KeyStore, **settings: Any) -> CredentialSettings:
    return CredentialSettings(api_keys=store.path, **settings)


async def test_without_a_credential_nothing_opens(store: KeyStore) -> None:
    async with live_edge(credentials=keyed(store)) as edge:
        for path in WEBSOCKETS:
            assert await refusal(edge, path) == 401
        code, told, headers = await answer(edge, "POST", "/api/chat", json=CHAT)
        assert (code, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "credential" in told["detail"]
        assert (await answer(edge, "POST", "/v1/realtime/client_secrets", json={}))[0] == 401
        assert (await answer(edge, "GET", "/health"))[0] == 200
        assert edge.fabric.acquisitions.empty()


async def test_key_opens_sessions_in_each_place(store: KeyStore) -> None:
    key = store.new()
    async with live_edge(credentials=keyed(store)) as edge:
        for name, how in carriers(edge, key.text).items():
            async with connected(edge, **how) as client:
                assert key.text not in (client.subprotocol or ""), name
                await begin(client)
                await exchange(client)
                await end(client)
        code, _, _ = await answer(edge, "GET", "/api/presets", headers=bearer(key.text))
        assert code == 200


async def test_bad_keys_are_refused_in_each_place(store: KeyStore) -> None:
    good, disabled = store.new(), store.new(rest="disabled = true")
    expired, revoked = store.new(rest="expires = 2020-01-01T00:00:00Z"), store.new("another")
    store.remove(revoked)
    bad = {
        "unknown": new_key().text,
        "wrong secret": f"dpk_{good.key_id}_{'0' * 64}",
        "hash as secret": f"dpk_{good.key_id}_{good.digest}",
        "cut": good.text[:-1],
        "disabled": disabled.text,
        "expired": expired.text,
        "revoked": revoked.text,
        "other case": good.text.upper(),
        "no key": "x",
    }
    async with live_edge(credentials=keyed(store)) as edge:
        for number, (name, text) in enumerate(bad.items()):
            place = list(carriers(edge, text).values())[number % 5]
            assert await refusal(edge, **place) == 401, name
        assert edge.fabric.acquisitions.empty()


async def test_unknown_and_wrong_keys_get_equal_answers(store: KeyStore) -> None:
    wrong = f"dpk_{store.new().key_id}_{'0' * 64}"
    async with live_edge(credentials=keyed(store)) as edge:
        first, second = [
            await answer(edge, "GET", "/api/presets", headers=bearer(key))
            for key in (wrong, new_key().text)
        ]
        assert first[0] == 401
        assert first[:2] == second[:2]
        assert {**first[2], "Date": ""} == {**second[2], "Date": ""}


async def test_two_different_credentials_are_refused(store: KeyStore) -> None:
    one, other = store.new(), store.new()
    async with live_edge(credentials=keyed(store)) as edge:
        token = await make_token(edge, one.text)
        second = [f"duplane.bearer.{other.text}"]
        assert await refusal(edge, headers=bearer(one.text), protocols=second) == 400
        both = [f"map-api-key.{one.text}", *second]
        assert await refusal(edge, protocols=both) == 400
        assert await refusal(edge, f"/v1/realtime?token={token}", protocols=second) == 400
        cookie = {"Cookie": f"__Host-duplane={one.text}; __Host-duplane={other.text}"}
        assert await refusal(edge, headers=cookie) == 400
        same = [f"map-api-key.{one.text}", f"openai-insecure-api-key.{one.text}"]
        assert await refusal(edge, headers=bearer(one.text), protocols=same) == 0


async def test_cookie_counts_only_for_pages_with_an_origin(store: KeyStore) -> None:
    cookie = {"Cookie": f"__Host-duplane={store.new().text}"}
    async with live_edge(credentials=keyed(store)) as edge:
        own = {"Origin": f"http://{edge.edge.address}"}
        assert await refusal(edge, headers=cookie) == 403
        assert await refusal(edge, headers={**cookie, "Origin": "https://evil.example"}) == 403
        assert await refusal(edge, headers={**cookie, **own}) == 0


async def test_key_in_the_url_is_refused(store: KeyStore) -> None:
    key = store.new()
    async with live_edge(credentials=keyed(store)) as edge:
        assert await refusal(edge, f"/v1/realtime?mode=audio&token={key.text}") == 400
        assert await refusal(edge, f"/v1/realtime?mode=audio&api_key={key.text}") == 401


async def test_ten_failed_logins_a_minute_and_no_more(store: KeyStore) -> None:
    key = store.new()
    settings: dict[str, Any] = {"credentials": keyed(store), "admin_token": "admin-word"}
    async with live_edge(clock=HandSetClock(), **settings) as edge:

        async def login(token: str) -> int:
            return (await answer(edge, "GET", "/api/presets", headers=bearer(token)))[0]

        assert [await login(new_key().text) for _ in range(11)] == [401] * 10 + [429]
        code, told, headers = await answer(edge, "GET", "/workers", headers=bearer("admin-word"))
        assert (code, "too many failed logins" in told["detail"]) == (429, True)
        assert 1 <= int(headers["Retry-After"]) <= 6
        assert await login("guess") == 429
        assert await login(key.text) == 200  # others of this address are not locked out


async def test_page_that_repeats_a_used_token_locks_out_nobody_at_its_address(
    store: KeyStore,
) -> None:
    key = store.new()
    async with live_edge(clock=HandSetClock(), credentials=keyed(store)) as edge:
        used = await make_token(edge, key.text)
        repeated = [await refusal(edge, protocols=[f"duplane.bearer.{used}"]) for _ in range(13)]
        assert repeated == [0, *[401] * 10, 429, 429]
        fresh = await make_token(edge, key.text)
        assert await refusal(edge, protocols=[f"duplane.bearer.{fresh}"]) == 0


async def test_guessed_admin_tokens_are_limited_where_clients_need_no_credential() -> None:
    async with live_edge(clock=HandSetClock(), admin_token="right") as edge:

        async def login(token: str) -> int:
            return (await answer(edge, "GET", "/workers", headers=bearer(token)))[0]

        assert await login("right") == 200
        assert [await login(f"guess {number}") for number in range(11)] == [403] * 10 + [429]
        assert await login("right") == 429
        # Tokens of clients mean nothing here, and lock nobody out.
        assert await refusal(edge, headers=bearer("x")) == 0


async def test_keys_of_operators_count_only_in_the_header_and_within_their_scopes(
    store: KeyStore,
) -> None:
    tenant = store.new()
    operators = KeyStore(store.path.parent, "operators.toml", head="")
    operator = operators.add('operator = "eve"\nscopes = ["read"]')
    settings = keyed(store, operator_keys=operators.path)
    async with live_edge(credentials=settings) as edge:

        async def ask(method: str, path: str, key: str) -> int:
            return (await answer(edge, method, path, headers=bearer(key)))[0]

        assert await ask("GET", "/workers", operator.text) == 200
        assert await ask("DELETE", "/api/sessions/sess_0", operator.text) == 403
        assert await ask("GET", "/workers", tenant.text) == 403
        assert await ask("DELETE", "/api/sessions/sess_0", tenant.text) == 403
        assert (await answer(edge, "GET", "/workers"))[0] == 401  # being local is not enough
        for name, how in carriers(edge, operator.text).items():
            assert await refusal(edge, **how) == (0 if name == "header" else 401), name
        operators.remove(operator)
        operators.add('operator = "adam"\nscopes = ["read"]')
        await edge.edge.reload()
        assert await ask("GET", "/workers", operator.text) == 401


# --- ephemeral tokens ---


async def status_of_head(url: str) -> int:
    """Ask for a WebSocket with HEAD, whose answers end with their head."""
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with aiohttp.ClientSession() as client, client.head(url, headers=upgrade) as head:
        return head.status


async def test_ephemeral_token_opens_one_session_in_each_place(store: KeyStore) -> None:
    key = store.new()
    async with live_edge(credentials=keyed(store)) as edge:
        for name in carriers(edge, ""):
            how = carriers(edge, await make_token(edge, key.text))[name]
            assert await refusal(edge, **how) == 0, name
            assert await refusal(edge, **how) == 401, name
        url = f"/v1/realtime?mode=audio&token={await make_token(edge, key.text)}"
        assert (await answer(edge, "GET", url))[0] == 426  # no WebSocket: the token is not used
        assert await status_of_head(f"http://{edge.edge.address}{url}") == 426
        assert await refusal(edge, url) == 0
        assert await refusal(edge, url) == 401


async def test_ephemeral_token_reaches_no_other_route(store: KeyStore) -> None:
    key = store.new()
    async with live_edge(credentials=keyed(store)) as edge:
        token = await make_token(edge, key.text)
        for method, path, body in (
            ("GET", "/api/presets", {}),
            ("GET", "/workers", {}),
            ("POST", "/v1/realtime/client_secrets", {"json": {}}),
        ):
            assert (await answer(edge, method, path, headers=bearer(token), **body))[0] == 403
        assert await refusal(edge, headers=bearer(token)) == 0


async def test_ephemeral_token_is_bound_to_its_mode_and_origin(store: KeyStore) -> None:
    key, listed = store.new(), "https://app.example"
    async with live_edge(credentials=keyed(store), allowed_origins=(listed,)) as edge:
        token = await make_token(edge, key.text, session={"mode": "audio"}, origin=listed)
        right = {**bearer(token), "Origin": listed}
        own = {**bearer(token), "Origin": f"http://{edge.edge.address}"}
        assert await refusal(edge, "/v1/realtime?mode=video", headers=right) == 403
        assert await refusal(edge, "/ws/chat", headers=right) == 403
        assert await refusal(edge, headers=own) == 403
        assert await refusal(edge, headers=bearer(token)) == 403
        assert await refusal(edge, headers=right) == 0


async def test_ephemeral_token_ends_with_the_key_that_asked_for_it(store: KeyStore) -> None:
    key = store.new()
    async with live_edge(credentials=keyed(store)) as edge:
        token = await make_token(edge, key.text)
        store.change(key, "disabled = true")
        await edge.edge.reload()
        assert await refusal(edge, headers=bearer(token)) == 401


async def test_forged_ephemeral_tokens_are_refused(store: KeyStore) -> None:
    key = store.new()
    async with live_edge(credentials=keyed(store)) as first:
        foreign = await make_token(first, key.text)
    async with live_edge(credentials=keyed(store)) as edge:
        token = await make_token(edge, key.text)
        content, _, signature = token.partition(".")
        later = pybase64.urlsafe_b64encode(b'{"e":9999999999}').rstrip(b"=").decode()
        for text in (foreign, f"ek_{later}.{signature}", content, f"{content}.", "ek_"):
            assert await refusal(edge, headers=bearer(text)) == 401, text


# --- sessions whose key ends ---


@pytest.mark.parametrize("how", ["disabled", "revoked"])
async def test_running_sessions_end_with_their_key_and_others_go_on(
    store: KeyStore, how: str
) -> None:
    key, other = store.new(), store.new()
    async with live_edge(credentials=keyed(store), slot_count=3) as edge:
        token = await make_token(edge, key.text)
        async with (
            connected(edge, headers=bearer(key.text)) as ended,
            connected(edge, headers=bearer(token)) as derived,
            connected(edge, headers=bearer(other.text)) as kept,
        ):
            for client in (ended, derived, kept):
                await begin(client)
            if how == "disabled":
                store.change(key, "disabled = true")
            else:
                store.remove(key)
            await edge.edge.reload()
            for client in (ended, derived):
                await expect_end(client, f"the key is {how}")
            await exchange(kept)
            await end(kept)


async def expect_end(client: ClientConnection, reason: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        error = orjson.loads(await client.recv())
        await client.wait_closed()
    assert (error["type"], error["error"]["message"]) == ("error", reason)
    assert (client.close_code, client.close_reason) == (1008, reason)


async def test_session_ends_when_its_key_expires(store: KeyStore) -> None:
    clock = HandSetClock()  # begins at 2024-04-27T06:40:00Z
    key = store.new(rest="expires = 2024-04-27T06:41:00Z")
    async with (
        live_edge(credentials=keyed(store), clock=clock) as edge,
        connected(edge, headers=bearer(key.text)) as client,
    ):
        await begin(client)
        clock.advance(59)
        await edge.edge.reload()
        await exchange(client)
        clock.advance(1)
        await edge.edge.reload()
        await expect_end(client, "the key has expired")
        assert await refusal(edge, headers=bearer(key.text)) == 401


async def test_waiting_session_ends_with_its_key(store: KeyStore) -> None:
    key = store.new()
    async with (
        live_edge(credentials=keyed(store), slot_count=1) as edge,
        connected(edge, headers=bearer(key.text)) as first,
    ):
        await begin(first)
        await edge.fabric.acquisition()
        async with connected(edge, headers=bearer(key.text)) as waiting:
            await edge.fabric.acquisition()
            store.remove(key)
            await edge.edge.reload()
            await expect_end(waiting, "the key is revoked")
        await expect_end(first, "the key is revoked")


async def test_end_of_a_session_is_logged_with_its_tenant_and_key(
    store: KeyStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "duplane.edge.session_registry")
    key = store.new()
    async with live_edge(credentials=keyed(store)) as edge:
        async with connected(edge, headers=bearer(key.text)) as client:
            await begin(client)
            await end(client)
        await edge.settled()
    (line,) = [line for line in caplog.messages if " ended after " in line]
    assert f"(tenant 'acme', credential 'dpk_{key.key_id}')" in line
    assert key.text not in caplog.text


async def test_broken_file_ends_no_session(store: KeyStore) -> None:
    key = store.new()
    async with (
        live_edge(credentials=keyed(store)) as edge,
        connected(edge, headers=bearer(key.text)) as client,
    ):
        await begin(client)
        store.path.write_text("")
        await edge.edge.reload()
        await exchange(client)
        assert await refusal(edge, headers=bearer(new_key().text)) == 401
        await end(client)
