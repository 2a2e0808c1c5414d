"""POST /v1/realtime/client_secrets: its answer, its bounds, and what a token says of its user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.edge.credential_rig import KeyStore, answer, bearer, connected, make_token, refusal
from support.edge.jwt_issuer import AUDIENCE, ISSUER, JwtIssuer
from support.edge.live_edge import HandSetClock, begin, end, live_edge
from support.monitoring.metrics import read

from duplane.edge.credentials.settings import CredentialSettings

PATH = "/v1/realtime/client_secrets"
SESSION = {"type": "realtime", "model": "gpt-realtime", "audio": {"output": {"voice": "x"}}}


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path)


@pytest.fixture
def token_key_file(tmp_path: Path) -> Path:
    path = tmp_path / "token.key"
    path.touch(0o600)
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def keyed(store: KeyStore) -> CredentialSettings:
    return CredentialSettings(api_keys=store.path)


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({}, 60),
        ({"session": SESSION}, 60),
        ({"expires_after": {"anchor": "created_at", "seconds": 10}, "session": SESSION}, 10),
        ({"expires_after": {"seconds": 7200}}, 7200),
    ],
)
async def test_answer_has_the_form_that_clients_know(
    body: dict[str, Any], seconds: int, store: KeyStore
) -> None:
    clock = HandSetClock()
    headers = bearer(store.new().text)
    async with live_edge(credentials=keyed(store), clock=clock) as edge:
        code, told, _ = await answer(edge, "POST", PATH, json=body, headers=headers)
        assert code == 200
        assert told.keys() == {"value", "expires_at", "session"}
        assert told["value"].startswith("ek_")
        assert told["expires_at"] == int(clock.now().wall_s) + seconds
        assert told["session"] == body.get("session", {})
        clock.advance(seconds)
        code, told, _ = await answer(edge, "GET", "/v1/realtime", headers=bearer(told["value"]))
        assert (code, "expired" in told["detail"]) == (401, True)


BAD_BODIES: Sequence[tuple[Any, str]] = [
    ({"expires_after": {"seconds": 9}}, "expires_after.seconds"),
    ({"expires_after": {"seconds": 7201}}, "expires_after.seconds"),
    ({"expires_after": {"seconds": 60.5}}, "expires_after.seconds"),
    ({"expires_after": {"seconds": True}}, "expires_after.seconds"),
    ({"expires_after": {"seconds": "60"}}, "expires_after.seconds"),
    ({"expires_after": {"anchor": "now"}}, "expires_after.anchor"),
    ({"expires_after": {"minutes": 1}}, "expires_after.minutes"),
    ({"expires_after": 60}, "expires_after"),
    ({"session": []}, "session"),
    ({"session": {"mode": "unknown"}}, "session.mode"),
    ({"session": {"mode": 1}}, "session.mode"),
    ({"origin": "app.example"}, "origin"),
    ({"origin": 1}, "origin"),
    ({"subject": "a\n"}, "subject"),
    ({"subject": "x" * 129}, "subject"),
    ({"subject": 7}, "subject"),
    ({"record": "no"}, "record"),
    ({"tenant": "another"}, "tenant"),
    ([], "the body"),
]


async def test_bad_field_is_named(store: KeyStore) -> None:
    headers = bearer(store.new().text)
    async with live_edge(credentials=keyed(store)) as edge:
        for body, field in BAD_BODIES:
            code, told, _ = await answer(edge, "POST", PATH, json=body, headers=headers)
            assert (code, told["detail"].startswith(f"{field} ")) == (422, True), (body, told)


async def test_long_body_is_refused(store: KeyStore) -> None:
    headers = bearer(store.new().text)
    async with live_edge(credentials=keyed(store)) as edge:
        body = {"session": {"instructions": "x" * 64 * 1024}}
        assert (await answer(edge, "POST", PATH, json=body, headers=headers))[0] == 413


async def test_token_is_made_and_ignored_where_clients_need_no_credential() -> None:
    async with live_edge() as edge:
        code, told, _ = await answer(edge, "POST", PATH, json={})
        assert code == 200
        for _ in range(2):  # no credential is needed, so a token that was used opens, too
            async with connected(edge, headers=bearer(told["value"])) as client:
                await begin(client)
                await end(client)


async def test_user_of_an_issuer_cannot_ask_for_a_token_of_another_user() -> None:
    async with JwtIssuer().serving() as issuer:
        settings = CredentialSettings(jwks=issuer.url, jwt_issuer=ISSUER, jwt_audience=AUDIENCE)
        headers = bearer(issuer.token(sub="user 7", record=False))
        async with live_edge(credentials=settings) as edge:
            for body, code in (
                ({"subject": "user 8"}, 422),
                ({"record": True}, 422),
                ({"subject": "user 7", "record": False}, 200),
            ):
                assert (await answer(edge, "POST", PATH, json=body, headers=headers))[0] == code


async def test_operator_is_no_tenant_and_gets_no_token(store: KeyStore) -> None:
    async with live_edge(credentials=keyed(store), admin_token="right") as edge:
        code, told, _ = await answer(edge, "POST", PATH, json={}, headers=bearer("right"))
        assert (code, "only a tenant" in told["detail"]) == (403, True)


async def test_sessions_are_counted_by_the_tenants_of_the_file(store: KeyStore) -> None:
    key = store.new("acme")
    store.new("quiet")
    async with JwtIssuer().serving() as issuer:
        settings = CredentialSettings(
            api_keys=store.path, jwks=issuer.url, jwt_issuer=ISSUER, jwt_audience=AUDIENCE
        )
        async with live_edge(credentials=settings, slot_count=3) as edge:
            token = await make_token(edge, key.text)
            foreign = issuer.token(tenant="not-in-the-file")
            async with (
                connected(edge, headers=bearer(key.text)) as first,
                connected(edge, headers=bearer(token)) as second,
                connected(edge, headers=bearer(foreign)) as third,
            ):
                for client in (first, second, third):
                    await begin(client)
                seen = read(edge.edge.metrics.registry)
                counts = {
                    tenant: seen.value("duplane_tenant_sessions", tenant=tenant)
                    for tenant in ("acme", "quiet", "other")
                }
                assert counts == {"acme": 2, "quiet": 0, "other": 1}
                for client in (first, second, third):
                    await end(client)
            await answer(edge, "GET", "/api/presets", headers=bearer("x"))
            assert read(edge.edge.metrics.registry).value("duplane_logins_refused_total") == 1


async def test_scheduler_gets_the_tenant_and_its_limits(store: KeyStore) -> None:
    store.head = "[tenants.acme]\nsessions = 4\nminutes = 600\n"
    key = store.new("acme")
    async with live_edge(credentials=keyed(store)) as edge:
        for headers in (bearer(key.text), bearer(await make_token(edge, key.text))):
            async with connected(edge, headers=headers) as client:
                await begin(client)
                await end(client)
            request = (await edge.fabric.acquisition()).request
            assert request.tenant_id == "acme"
            limits = request.tenant_limits
            assert (limits.session_count, limits.daily_minutes) == (4, 600)
            assert not limits.HasField("waiting_count")


async def test_scheduler_gets_no_tenant_where_clients_need_no_credential() -> None:
    async with live_edge() as edge:
        async with connected(edge, headers=bearer("x")) as client:
            await begin(client)
            await end(client)
        request = (await edge.fabric.acquisition()).request
        assert request.tenant_id == ""
        assert request.tenant_limits.ByteSize() == 0


async def test_edges_with_one_key_file_accept_each_others_tokens(
    store: KeyStore, token_key_file: Path
) -> None:
    key = store.new()
    settings = CredentialSettings(api_keys=store.path, token_key_file=token_key_file)
    async with live_edge(credentials=settings) as first, live_edge(credentials=settings) as second:
        token = await make_token(first, key.text)
        assert await refusal(second, headers=bearer(token)) == 0
        assert await refusal(second, headers=bearer(token)) == 401


async def test_token_asks_one_question_over_http(store: KeyStore) -> None:
    key = store.new()
    question = {"messages": [{"role": "user", "content": "hello"}]}
    async with live_edge(credentials=keyed(store)) as edge:
        headers = bearer(await make_token(edge, key.text, session={"mode": "chat"}))
        codes = [
            (await answer(edge, "POST", "/api/chat", json=question, headers=headers))[0]
            for _ in range(2)
        ]
    assert codes == [200, 401]
