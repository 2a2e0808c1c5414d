"""A client returns at another edge: in-process edges, a scheduler and a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.edge.credential_rig import KeyStore, bearer
from support.edge.live_edge import AUDIO, HandSetClock, closed, receive, send
from support.fabric.in_process import LocalWorker, running_edge
from support.scheduler.scheduler_harness import SchedulerHarness
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from duplane.edge import remote_returns
from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.server import Edge
from duplane.fabric import client as fabric_client

SETTINGS = {"type": "session.init", "payload": {"resumable": True}}
APPEND = {"type": "input.append", "input": {"audio": AUDIO}}
LEAVE = {"type": "session.close"}


@dataclass
class Fabric:
    """Two edges, a scheduler, and a worker that keeps copies."""

    edges: list[Edge]
    stack: contextlib.AsyncExitStack
    cursor: dict[str, Any] = field(default_factory=dict[str, Any])

    async def connect(self, at: int, **headers: str) -> ClientConnection:
        url = f"ws://{self.edges[at].address}/v1/realtime?mode=audio"
        opening = connect(url, additional_headers=headers, compression=None, proxy=None)
        return await self.stack.enter_async_context(opening)

    async def begin(self, at: int, **headers: str) -> tuple[ClientConnection, str]:
        """Begin a resumable session with one unit; return its token."""
        client = await self.connect(at, **headers)
        await told(client, "session.queue_done")
        await send(client, SETTINGS)
        token = (await told(client, "session.created"))["resume"]["token"]
        await send(client, APPEND)
        event = await receive(client)
        self.cursor = {key: event[key] for key in ("unit", "part")}
        return client, token

    async def ask(
        self, at: int, token: str, **headers: str
    ) -> tuple[ClientConnection, dict[str, Any]]:
        """Ask for a session on a new socket until it is not busy; return the answer."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                client = await self.connect(at, **headers)
                await send(client, {"type": "session.resume", "token": token, **self.cursor})
                answer = await told(client, "session.resumed", "error")
                if code_of(answer) != "resume_busy":
                    return client, answer
                await closed(client, 1013)


async def told(client: ClientConnection, *kinds: str) -> dict[str, Any]:
    """Read until an event of one of these types."""
    while (event := await receive(client))["type"] not in kinds:
        pass
    return event


def code_of(answer: dict[str, Any]) -> str:
    return answer.get("error", {}).get("code", "")


async def leave(client: ClientConnection) -> None:
    await send(client, LEAVE)
    with contextlib.suppress(ConnectionClosed):
        while True:
            await receive(client)


@contextlib.asynccontextmanager
async def fabric(**settings: Any) -> AsyncGenerator[Fabric]:
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(SchedulerHarness.running())
        operator = await scheduler.operator()
        own: dict[str, Any] = {"checkpoint": "scripted", "worker_id": "w", "slot_count": 2}
        worker = LocalWorker(None, schedulers=(scheduler.address,), **own)
        stack.push_async_callback(worker.cancel)
        await operator.until(lambda seen: bool(seen.workers))
        edges = [
            await stack.enter_async_context(
                running_edge(scheduler.address, continuity="worker", **settings)
            )
            for _ in range(2)
        ]
        yield Fabric(edges, await stack.enter_async_context(contextlib.AsyncExitStack()))


async def lost(edge: Edge) -> None:
    """Wait until the edge has a session without a socket."""

    async def is_held() -> bool:
        labels = {"state": "held"}
        return bool(edge.metrics.registry.get_sample_value("duplane_detached_sessions", labels))

    await until(is_held, WITHIN_S)


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
async def test_client_that_loses_its_socket_while_its_edge_shuts_down_returns_elsewhere(
    *, is_before: bool
) -> None:
    async with fabric() as play:
        client, token = await play.begin(0)
        other, _ = await play.begin(0)
        if is_before:
            client.transport.abort()
            await lost(play.edges[0])
        draining = asyncio.ensure_future(play.edges[0].drain())
        await told(other, "session.go_away")
        if not is_before:
            await told(client, "session.go_away")
            client.transport.abort()
        client, answer = await play.ask(1, token)
        assert answer["type"] == "session.resumed", answer
        await send(client, APPEND)
        while (await receive(client)).get("unit") != 1:
            pass
        await leave(client)
        await leave(other)
        async with asyncio.timeout(WITHIN_S):
            await draining


async def test_only_the_tenant_of_a_session_can_have_it_at_another_edge(tmp_path: Path) -> None:
    store = KeyStore(tmp_path, head="[tenants.acme]\n[tenants.beta]\n")
    own, thief = (bearer(store.new(tenant).text) for tenant in ("acme", "beta"))
    async with fabric(credentials=CredentialSettings(api_keys=store.path)) as play:
        client, token = await play.begin(0, **own)
        other, answer = await play.ask(1, token, **thief)
        assert code_of(answer) == "resume_refused"
        await closed(other, 1008)
        client, answer = await play.ask(1, token, **own)
        assert answer["type"] == "session.resumed", answer
        await leave(client)


async def test_session_is_found_without_the_address_of_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def leases_of(*_: object) -> list[str]:  # as from a scheduler of an older release
        return []

    monkeypatch.setattr(fabric_client, "leases_of", leases_of)
    async with fabric() as play:
        former, token = await play.begin(0)  # its edge holds the slot as long as it lives
        client, answer = await play.ask(1, token)
        assert answer["type"] == "session.resumed", answer
        await closed(former, 1000)
        await leave(client)


async def test_session_that_goes_from_edge_to_edge_too_often_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_returns, "_TAKEN_PER_MINUTE", 3.0)
    async with fabric(clock=HandSetClock()) as play:
        client, token = await play.begin(0)
        for turn in range(6):
            client, answer = await play.ask(1 - turn % 2, token)
            assert answer["type"] == "session.resumed", (turn, answer)
        other, answer = await play.ask(1, token)
        assert code_of(answer) == "resume_refused"
        assert "too often" in answer["error"]["message"]
        await closed(other, 1008)
        await leave(client)


async def test_clients_that_name_unknown_sessions_are_slowed_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_returns, "_FAILED_PER_MINUTE", 5.0)
    async with fabric(trusted_proxies=("127.0.0.1",), clock=HandSetClock()) as play:

        async def ask(address: str) -> str:
            client = await play.connect(0, **{"X-Forwarded-For": address})
            await send(client, {"type": "session.resume", "token": "sess_0.x"})
            answer = await told(client, "error")
            await client.wait_closed()
            return code_of(answer)

        for _ in range(5):
            assert await ask("198.51.100.1") == "resume_lost"
        assert await ask("198.51.100.1") == "resume_busy"
        assert await ask("198.51.100.2") == "resume_lost"


async def test_token_of_another_form_is_neither_looked_for_nor_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "duplane")
    async with fabric() as play:
        for token in ("only-a-secret", ".secret", "x\ny.secret", "sess_0.", "s-1.secret"):
            client, answer = await play.ask(0, token)
            assert code_of(answer) == "resume_refused"
            await closed(client, 1008)
    logged = [one.getMessage() for one in caplog.records if one.name.startswith("duplane")]
    assert any("is not resumed" in message for message in logged)
    assert not [one for one in logged if "is not taken" in one or "secret" in one]
