"""Two edges and a scheduler: the keys of one tenant share its limits over both edges."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import orjson
from support.edge.credential_rig import KeyStore, bearer
from support.fabric.in_process import running_edge
from support.scheduler.scheduler_harness import SchedulerHarness
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection, connect

from duplane.edge.credentials.settings import CredentialSettings


async def first_event(client: ClientConnection) -> dict[str, object]:
    async with asyncio.timeout(WITHIN_S):
        return orjson.loads(await client.recv())


async def test_two_edges_share_the_quota_of_a_tenant(tmp_path: Path) -> None:
    store = KeyStore(tmp_path, head="[tenants.acme]\nsessions = 2\n[tenants.beta]\nsessions = 2\n")
    keys = [store.new(), store.new()]
    other = store.new("beta")
    credentials = CredentialSettings(api_keys=store.path)
    async with contextlib.AsyncExitStack() as stack:
        harness = await stack.enter_async_context(SchedulerHarness.running())
        edges = [
            await stack.enter_async_context(running_edge(harness.address, credentials=credentials))
            for _ in range(2)
        ]

        async def open_session(at: int, token: str) -> ClientConnection:
            url = f"ws://{edges[at].address}/v1/realtime?mode=audio"
            return await stack.enter_async_context(
                connect(url, additional_headers=bearer(token), compression=None, proxy=None)
            )

        for at, key in enumerate(keys):
            waiting = await open_session(at, key.text)
            assert (await first_event(waiting))["type"] == "session.queued"
        for at, key in enumerate(keys):
            refused = await open_session(at, key.text)
            told = await first_event(refused)
            assert told["error"] == {
                "code": "queue_full",
                "message": "Quota exhausted: sessions at the same time",
                "type": "server_error",
            }
            await refused.wait_closed()
            assert refused.close_code == 1013
        assert (await first_event(await open_session(0, other.text)))["type"] == "session.queued"
