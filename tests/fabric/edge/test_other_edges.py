"""A client returns at another edge: in-process edges, a scheduler and a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.edge.credential_rig import KeyStore, bearer
from support.edge.live_edge import AUDIO, HandSetClock, closed, receive, send
from support.fabric.in_process import LocalWorker, running_edge
from support.scheduler.scheduler_harness import SchedulerHarness
from support.scheduler.watching_operator import Operator
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from duplane.edge import remote_returns
from duplane.edge.client_errors import ErrorCode
from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.server import Edge
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.fabric import attaching
from duplane.worker.session.copy_pace import CopyPace

SETTINGS = {"type": "session.init", "payload": {"resumable": True}}
APPEND = {"type": "input.append", "input": {"audio": AUDIO}}
LEAVE = {"type": "session.close"}
PAST_BYTES = 32_000  # the sound of a unit


@dataclass
class Fabric:
    """Two edges, a scheduler, and a worker that keeps copies."""

    scheduler: SchedulerHarness
    operator: Operator
    worker: LocalWorker
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

    async def add_worker(self) -> None:
        """Add a worker to which sessions can move."""
        self.stack.push_async_callback(local_worker(self.scheduler, "spare").cancel)
        await self.operator.until(lambda seen: len(seen.workers) == 2)

    async def resumed_elsewhere(self) -> tuple[ClientConnection, str]:
        """Begin a session at the first edge, and return to it at the second one.

        There is a worker to which it can move.
        """
        _, token = await self.begin(0)
        await self.add_worker()
        client, answer = await self.ask(1, token)
        assert answer["type"] == "session.resumed", answer
        return client, token

    async def parked(self, at: int) -> None:
        """Wait until a session of an edge has no socket, and all slots are free."""
        await lost(self.edges[at], "parked")
        await self.operator.until(lambda seen: not seen.leases)

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


def local_worker(scheduler: SchedulerHarness, worker_id: str, **settings: Any) -> LocalWorker:
    own: dict[str, Any] = {"checkpoint": "scripted", "worker_id": worker_id, "slot_count": 2}
    return LocalWorker(None, schedulers=(scheduler.address,), **own, **settings)


async def answered(client: ClientConnection, unit: int) -> None:
    """Read until the event of a unit."""
    while (await receive(client)).get("unit") != unit:
        pass


async def leave(client: ClientConnection) -> None:
    await send(client, LEAVE)
    with contextlib.suppress(ConnectionClosed):
        while True:
            await receive(client)


@contextlib.asynccontextmanager
async def fabric(
    *, worker_settings: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> AsyncGenerator[Fabric]:
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(SchedulerHarness.running())
        operator = await scheduler.operator()
        worker = local_worker(scheduler, "w", **worker_settings)
        stack.push_async_callback(worker.cancel)
        await operator.until(lambda seen: bool(seen.workers))
        edges = [
            await stack.enter_async_context(
                running_edge(scheduler.address, continuity="worker", **settings)
            )
            for _ in range(2)
        ]
        clients = await stack.enter_async_context(contextlib.AsyncExitStack())
        yield Fabric(scheduler, operator, worker, edges, clients)


async def lost(edge: Edge, state: str = "held", *, is_any: bool = True) -> None:
    """Wait until the edge has a session without a socket, or has none."""

    async def is_lost() -> bool:
        labels = {"state": state}
        count = edge.metrics.registry.get_sample_value("duplane_detached_sessions", labels)
        return bool(count) is is_any

    await until(is_lost, WITHIN_S)


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


async def test_client_is_answered_before_the_other_edge_has_the_past_units() -> None:
    async with fabric() as play:
        client, _ = await play.resumed_elsewhere()
        journal_bytes = partial(
            play.edges[1].metrics.registry.get_sample_value, "duplane_journal_bytes"
        )
        before = journal_bytes() or 0.0  # with the events that the client lacked

        async def has_past_units() -> bool:
            return (journal_bytes() or 0.0) >= before + PAST_BYTES

        await until(has_past_units, WITHIN_S)
        await play.worker.cancel()
        await told(client, "session.moving")
        await send(client, APPEND)
        await answered(client, 1)
        await leave(client)


async def test_session_is_lost_with_its_worker_before_the_other_edge_has_the_past_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CopyPace, "quiet_s", WITHIN_S)
    async with fabric() as play:
        client, token = await play.resumed_elsewhere()
        await play.worker.cancel()
        await closed(client, 1001)
        client, answer = await play.ask(1, token)
        assert code_of(answer) == "resume_expired"


async def test_session_without_a_slot_survives_an_event_that_it_has_not() -> None:
    limits, copies = Limits(hold_s=0.001), {"copy_bytes": 0}
    async with fabric(worker_settings=copies, limits=limits) as play:
        client, token = await play.begin(0)
        client.transport.abort()
        await play.parked(0)
        known, play.cursor = play.cursor, {"unit": 7, "part": 0}
        other, answer = await play.ask(0, token)
        assert code_of(answer) == "resume_stale"
        await closed(other, 1008)
        play.cursor = known
        client, answer = await play.ask(0, token)
        assert answer["type"] == "session.resumed", answer
        await leave(client)


async def test_client_returns_to_an_edge_from_which_another_one_has_taken_its_session() -> None:
    async with fabric(limits=Limits(hold_s=0.001)) as play:
        client, token = await play.begin(0)
        client.transport.abort()
        await play.parked(0)
        for at, unit in ((1, 1), (0, 2)):
            client, answer = await play.ask(at, token)
            assert answer["type"] == "session.resumed", answer
            await send(client, APPEND)
            while (event := await receive(client)).get("unit") != unit:
                pass
            play.cursor = {key: event[key] for key in ("unit", "part")}
        await leave(client)
        for edge in play.edges:
            await lost(edge, "parked", is_any=False)


async def test_only_the_tenant_of_a_session_can_have_it_at_another_edge(tmp_path: Path) -> None:
    store = KeyStore(tmp_path, head="[tenants.acme]\n[tenants.beta]\n")
    own, thief = (bearer(store.new(tenant).text) for tenant in ("acme", "beta"))
    async with fabric(credentials=CredentialSettings(api_keys=store.path)) as play:
        client, token = await play.begin(0, **own)
        other, answer = await play.ask(1, token, **thief)
        assert code_of(answer) == "resume_refused"
        assert "another client" in answer["error"]["message"]
        await closed(other, 1008)
        await send(client, APPEND)  # nothing has changed for the session
        while (await receive(client)).get("unit") != 1:
            pass
        client, answer = await play.ask(1, token, **own)
        assert answer["type"] == "session.resumed", answer
        await leave(client)


async def test_edge_forgets_a_session_that_it_cannot_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fabric() as play:
        _, token = await play.begin(0)
        stale = ErrorCode.RESUME_STALE, "unit: the session has no such event"
        monkeypatch.setattr(DuplexSession, "refuses", lambda *_: stale)
        client, answer = await play.ask(1, token)
        assert code_of(answer) == "resume_stale"
        await closed(client, 1008)
        metrics = play.edges[1].metrics.registry
        assert metrics.get_sample_value("duplane_journal_bytes") == 0


async def test_session_is_found_without_the_address_of_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def leases_of(*_: object) -> list[str]:  # as from a scheduler of an older release
        return []

    monkeypatch.setattr(attaching, "leases_of", leases_of)
    async with fabric() as play:
        former, token = await play.begin(0)  # its edge holds the slot as long as it lives
        client, answer = await play.ask(1, token)
        assert answer["type"] == "session.resumed", answer
        await closed(former, 1000)
        await leave(client)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
async def test_client_returns_at_another_edge_while_no_scheduler_answers(*, is_known: bool) -> None:
    async with fabric() as play:
        former, token = await play.begin(0)
        if is_known:
            other, _ = await play.begin(1)  # so this edge has used the worker
            await leave(other)
        await play.scheduler.stop()
        if not is_known:
            client = await play.connect(1)
            await send(client, {"type": "session.resume", "token": token, **play.cursor})
            assert code_of(await told(client, "session.resumed", "error")) == "resume_busy"
            await play.scheduler.start()
        client, answer = await play.ask(1, token)
        assert answer["type"] == "session.resumed", answer
        await closed(former, 1000)
        await send(client, APPEND)
        while (await receive(client)).get("unit") != 1:
            pass
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
