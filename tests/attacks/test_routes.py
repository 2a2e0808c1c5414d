"""Requests of strangers, tenants and operators to every route of the edge."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.edge.callers import NamedCallers, as_caller
from support.edge.credential_rig import KeyStore, bearer
from support.edge.live_edge import live_edge
from support.fabric.in_process import running_edge
from support.scheduler.scheduler_harness import SchedulerHarness

from duplane.edge.access import Level, Scope
from duplane.edge.credentials.keys import new_key
from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.http.access_control import AccessControl
from duplane.edge.http.application import application
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.server import Edge
from duplane.edge.transport.origins import BrowserRules
from duplane.edge.transport.rate_limit import NetworkRates

P, C, M, OP = Level.PUBLIC, Level.CLIENT, Level.MONITOR, Level.OPERATOR
ONE = "/api/sessions/{session}"
VOICES = "/api/assets/ref_audio"
OPERATOR_FILES = (
    *("operator.css", "icon.svg"),
    *(
        f"{name}.js"
        for name in (
            "api",
            "charts",
            "elements",
            "model",
            "operator",
            "recordings",
            "settings",
            "stream",
            "tables",
        )
    ),
)
DRAIN = "/api/admin/workers/{worker}/drain"
SECRETS_PATH = "/v1/realtime/client_secrets"

# Every route. A route that is missing here is open by mistake.
TABLE: Mapping[tuple[str, str], tuple[Level, Scope]] = {
    ("GET", "/health"): (P, Scope.READ),
    ("GET", "/ready"): (P, Scope.READ),
    ("GET", "/status"): (C, Scope.READ),
    ("GET", "/sessions"): (C, Scope.READ),
    ("GET", "/api/queue"): (C, Scope.READ),
    ("GET", "/api/queue/{ticket}"): (C, Scope.READ),
    ("GET", "/api/frontend_defaults"): (C, Scope.READ),
    ("GET", "/api/default_ref_audio"): (C, Scope.READ),
    ("GET", "/api/presets"): (C, Scope.READ),
    ("GET", "/api/presets/{mode}/{preset}/audio"): (C, Scope.READ),
    ("GET", "/api/apps"): (C, Scope.READ),
    ("GET", VOICES): (C, Scope.READ),
    ("GET", "/v1/realtime"): (C, Scope.READ),
    ("GET", "/ws/duplex/{session_id}"): (C, Scope.READ),
    ("GET", "/ws/chat"): (C, Scope.READ),
    ("GET", "/ws/half_duplex/{session_id}"): (C, Scope.READ),
    ("GET", "/v1/live/sessions"): (C, Scope.READ),
    ("GET", "/openai/v1/live/sessions"): (C, Scope.READ),
    ("GET", "/v1/models"): (C, Scope.READ),
    ("GET", "/v1/models/{model:.+}"): (C, Scope.READ),
    ("GET", "/openai/v1/realtime"): (C, Scope.READ),
    ("GET", "/realtime"): (C, Scope.READ),
    ("POST", "/api/chat"): (C, Scope.READ),
    ("POST", "/v1/chat/completions"): (C, Scope.READ),
    ("POST", SECRETS_PATH): (C, Scope.READ),
    ("GET", "/workers"): (M, Scope.READ),
    ("GET", "/cache"): (M, Scope.READ),
    ("GET", "/api/config/eta"): (M, Scope.READ),
    ("GET", "/api/admin/apps"): (M, Scope.READ),
    ("GET", "/api/admin/watch"): (M, Scope.READ),
    ("POST", DRAIN): (OP, Scope.DRAIN),
    ("DELETE", DRAIN): (OP, Scope.DRAIN),
    ("PUT", "/api/config/eta"): (OP, Scope.DRAIN),
    ("PUT", "/api/admin/apps/{app}"): (OP, Scope.DRAIN),
    ("DELETE", "/api/queue/{ticket}"): (OP, Scope.SESSIONS),
    ("DELETE", ONE): (OP, Scope.SESSIONS),
    ("POST", VOICES): (OP, Scope.VOICES),
    ("GET", f"{VOICES}/{{voice}}"): (OP, Scope.VOICES),
    ("DELETE", f"{VOICES}/{{voice}}"): (OP, Scope.VOICES),
    ("GET", "/api/sessions"): (OP, Scope.RECORDINGS),
    ("DELETE", "/api/sessions"): (OP, Scope.RECORDINGS),
    ("DELETE", f"{ONE}/recording"): (OP, Scope.RECORDINGS),
    ("GET", ONE): (OP, Scope.RECORDINGS),
    ("GET", f"{ONE}/recording"): (OP, Scope.RECORDINGS),
    ("GET", f"{ONE}/assets/{{asset:.*}}"): (OP, Scope.RECORDINGS),
    ("GET", f"{ONE}/download"): (OP, Scope.RECORDINGS),
    ("POST", f"{ONE}/upload-recording"): (OP, Scope.RECORDINGS),
    ("GET", f"{ONE}/comment"): (OP, Scope.RECORDINGS),
    ("POST", f"{ONE}/comment"): (OP, Scope.RECORDINGS),
    ("GET", "/"): (P, Scope.READ),
    ("GET", "/operator"): (P, Scope.READ),
    **{("GET", f"/pages/operator/{name}"): (P, Scope.READ) for name in OPERATOR_FILES},
    **{
        ("GET", f"/pages/talk/{name}"): (P, Scope.READ)
        for name in (
            *("talk.js", "view.js", "sound.js", "sound.worklet.js", "devices.js", "settings.js"),
            *("replay.js", "sent.js", "talk.css", "icon.svg"),
        )
    },
    **{
        ("GET", f"/pages/client/{name}.js"): (P, Scope.READ)
        for name in ("index", "session", "resuming", "events", "sound", "errors")
    },
}
STRANGERS = ("", "bad", "expired", "disabled", "revoked")
NAMES = (*STRANGERS, "tenant", "admin token", "operator", *(scope.value for scope in Scope))


class RealCallers:
    """Files of keys of a tenant and of operators, and the headers of each caller of NAMES."""

    def __init__(self, directory: Path) -> None:
        tenants = KeyStore(directory)
        operators = KeyStore(directory, "operators.toml", head="")
        revoked = tenants.new()
        keys = {
            "bad": new_key(),
            "expired": tenants.new(rest="expires = 2020-01-01T00:00:00Z"),
            "disabled": tenants.new(rest="disabled = true"),
            "revoked": revoked,
            "tenant": tenants.new(),
        }
        tenants.remove(revoked)
        every = [scope.value for scope in Scope]
        for name, scopes in [("operator", every), *((scope, [scope]) for scope in every)]:
            keys[name] = operators.add(f'operator = "{name}"\nscopes = {scopes}')
        self.headers = {name: bearer(key.text) for name, key in keys.items()}
        self.headers |= {"": {}, "admin token": bearer("secret")}
        self.settings: dict[str, Any] = {
            "admin_token": "secret",
            "credentials": CredentialSettings(api_keys=tenants.path, operator_keys=operators.path),
        }


@pytest.fixture
def callers(tmp_path: Path) -> RealCallers:
    return RealCallers(tmp_path)


async def status(
    client: aiohttp.ClientSession,
    address: str,
    route: HttpRoute,
    headers: Mapping[str, str],
    method: str = "",
) -> int:
    """Send a request to a route; return the status."""
    path = route.path.replace("{asset:.*}", "x").replace("{model:.+}", "x")
    for part in ("ticket", "mode", "preset", "session_id", "session", "voice", "app", "worker"):
        path = path.replace(f"{{{part}}}", "x")
    body: dict[str, Any] = {}
    if route.takes_form:
        body["data"] = aiohttp.MultipartWriter("form-data")
    elif route.method in ("POST", "PUT"):
        body["json"] = {}
    url = f"http://{address}{path}"
    asked = client.request(method or route.method, url, headers=headers, **body)
    async with asked as answer:
        return answer.status


def is_allowed(route: HttpRoute, name: str) -> bool:
    """Return what the table says about a caller."""
    if route.level is P:
        return True
    if name in STRANGERS or route.path == SECRETS_PATH:
        return name == "tenant"  # an operator has nothing to pass on to a browser
    if route.level is C:
        return True
    scope = Scope.READ if route.level is M else route.scope
    return name in ("admin token", "operator", scope.value)


@contextlib.asynccontextmanager
async def edge_with(
    settings: Mapping[str, Any],
) -> AsyncGenerator[tuple[Edge, aiohttp.ClientSession]]:
    async with live_edge(**settings) as live, aiohttp.ClientSession() as client:
        yield live.edge, client


async def test_every_route_has_the_level_of_the_table() -> None:
    async with edge_with({}) as (edge, _):
        found = {(each.method, each.path): (each.level, each.scope) for each in edge.routes}
    assert found == TABLE


@pytest.mark.parametrize("name", NAMES)
async def test_every_route_is_open_for_its_callers_only(name: str, callers: RealCallers) -> None:
    async with edge_with(callers.settings) as (edge, client):
        for route in edge.routes:
            methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
            for method in methods:
                code = await status(client, edge.address, route, callers.headers[name], method)
                if is_allowed(route, name):
                    assert code not in (401, 403, 429), (method, route.path)
                else:  # after ten failed logins 429
                    refusals = (401, 429) if name in STRANGERS else (403,)
                    assert code in refusals, (method, route.path)


@pytest.mark.parametrize("name", ["", "tenant", "operator"])
async def test_port_of_clients_has_no_route_of_operators(name: str, callers: RealCallers) -> None:
    settings = {**callers.settings, "operator_listen": "127.0.0.1:0"}
    async with edge_with(settings) as (edge, client):
        for route in edge.routes:
            code = await status(client, edge.address, route, callers.headers[name])
            if route.level in (M, OP) or route.is_for_operators:
                assert code == 404, route.path
            there = await status(client, edge.operator_address, route, callers.headers[name])
            assert (there not in (401, 403)) is is_allowed(route, name), route.path


async def test_wrong_method_tells_of_no_route_of_operators() -> None:
    async with edge_with({"operator_listen": "127.0.0.1:0"}) as (edge, client):
        for method, path, code in [
            ("PUT", "/workers", 404),
            ("POST", "/api/sessions/x/recording", 404),
            ("PUT", "/nowhere", 404),
            ("PUT", "/status", 405),
            ("PUT", "/api/queue/x", 405),
        ]:
            async with client.request(method, f"http://{edge.address}{path}") as answer:
                assert (answer.status, path) == (code, path)
        async with client.put(f"http://{edge.operator_address}/workers") as answer:
            assert answer.status == 405


async def test_application_with_a_route_without_a_level_does_not_start() -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response()

    control = AccessControl(
        NamedCallers(), BrowserRules((), (), lambda: ()), (), NetworkRates(1.0, 1.0)
    )
    app = application([], control)
    app.router.add_get("/forgotten", handle)
    with pytest.raises(ValueError, match="/forgotten"):
        await web.AppRunner(app).setup()


SECRETS = ("sess_runs", "sess_waits", "10.0.0.5", '"port":7000', "worker-of-acme", "incarnation")


async def texts(edge: Edge, paths: Sequence[str], name: str, address: str = "") -> str:
    """Return the answers to requests as a caller, joined."""
    found = ""
    async with aiohttp.ClientSession() as client:
        for path in paths:
            url = f"http://{address or edge.address}{path}"
            async with client.get(url, headers=as_caller(name)) as answer:
                found += await answer.text()
    return found


async def test_lists_name_sessions_and_workers_to_operators_only() -> None:
    """Without the role of an operator no answer has an id, an address or an incarnation."""
    async with SchedulerHarness.running() as scheduler:
        worker = await scheduler.worker("worker-of-acme", address="10.0.0.5:7000")
        await worker.claim(await (await scheduler.caller(session_id="sess_runs")).granted())
        waiting = await scheduler.caller(session_id="sess_waits")
        await waiting.stands(1)
        authenticator = NamedCallers()
        async with running_edge(
            scheduler.address, authenticator=authenticator, operator_listen="127.0.0.1:0"
        ) as edge:
            ticket = f"/api/queue/{waiting.ticket_id}"
            paths = ["/health", "/ready", "/status", "/workers", "/cache", "/api/queue", ticket]
            paths += ["/api/config/eta", "/api/sessions"]
            for name in ("", "tenant", "operator"):
                told = await texts(edge, paths, name)
                assert not [secret for secret in SECRETS if secret in told], name
                assert ('"found":true' in told) is (name != "")
            assert waiting.ticket_id not in await texts(edge, ["/api/queue"], "tenant")
            for name in ("", "tenant"):
                told = await texts(edge, paths, name, edge.operator_address)
                assert not [secret for secret in SECRETS if secret in told], name
            told = await texts(edge, paths, "operator", edge.operator_address)
            assert [secret for secret in SECRETS if secret in told] == [*SECRETS[:-1]]


async def test_health_of_strangers_has_no_details() -> None:
    async with edge_with({"authenticator": NamedCallers()}) as (edge, client):
        for name, has_details in (("", False), ("bad", False), ("tenant", True)):
            url = f"http://{edge.address}/health"
            async with client.get(url, headers=as_caller(name)) as answer:
                told = await answer.json()
            assert (answer.status, told["status"]) == (200, "healthy")
            assert ("worker_status" in told) is has_details
