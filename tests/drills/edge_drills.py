"""Drills of faults at the edge: credentials, tenants and recordings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from drills.drills import drill
from drills.site import WITHIN_S, Site, running
from support.fabric.servers import DUPLANE
from support.time_limits import until
from websockets.exceptions import ConnectionClosed, InvalidStatus

_KEYS = """\
duplane keys new keys.toml --tenant bakery > bakery.key
duplane keys new keys.toml --tenant garage > garage.key
duplane keys new operators.toml --operator drill --scope read,recordings,sessions > operator.key
mkdir recordings
"""
_KEY_FLAGS = ("--api-keys", "SITE/keys.toml", "--operator-keys", "SITE/operators.toml")
_RECORD_FLAGS = ("--record", "SITE/recordings", "--record-days", "30")
# A disk of its own, which only the edge sees.
_SMALL_DISK = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=3m tmpfs "$0" && exec "$@"',
)


@contextlib.asynccontextmanager
async def with_keys(
    folder: Path, *flags: str, edge_command: Sequence[str] = DUPLANE
) -> AsyncGenerator[Site]:
    """A fabric with two tenants and an operator."""
    edge_flags = (*_KEY_FLAGS, *flags)
    async with running(
        folder,
        edge_flags=edge_flags,
        edge_command=edge_command,
        prepare=_KEYS,
        scheduler_flags=("--ticket-limit", "50"),
    ) as site:
        site.environment["OPERATOR_KEY"] = key_of(folder, "operator")
        yield site


def key_of(folder: Path, name: str) -> str:
    return (folder / f"{name}.key").read_text().strip()


@drill("key-leaked", "DuplaneLoginsRefused")
async def key_leaked(folder: Path) -> None:
    """Use the key of a tenant, also after it is revoked; the other tenant goes on."""
    page = "key-leaked"
    async with with_keys(folder) as site:
        key, other_key = key_of(folder, "bakery"), key_of(folder, "garage")
        async with site.call(key) as thief, site.call(other_key) as other:
            listed = await site.follow(page, "Look")
            (row,) = [line for line in listed.splitlines() if "bakery" in line]
            site.environment["KEY_ID"] = row.split()[0]
            await site.follow(page, "Do")
            with contextlib.suppress(ConnectionClosed):
                async with asyncio.timeout(WITHIN_S):
                    while True:
                        await thief.receive()
            with pytest.raises(InvalidStatus, match="401"):
                async with site.client(key):
                    pass
            await other.exchange()
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
                for _ in range(110):
                    async with http.get(f"{site.environment['EDGE']}/v1/models") as answer:
                        assert answer.status in (401, 429)
            await site.fires("DuplaneLoginsRefused")
            async with site.call(key_of(folder, "new")) as again:
                await again.end()
            await site.follow(page, "Over")
            await other.end()


@drill("tenant-floods", "DuplaneTenantFloods")
async def tenant_floods(folder: Path) -> None:
    """Let one tenant hold both slots and five places in the queue of 50."""
    page = "tenant-floods"
    async with with_keys(folder) as site, contextlib.AsyncExitStack() as crowd:
        key, other_key = key_of(folder, "bakery"), key_of(folder, "garage")
        holding = [await crowd.enter_async_context(site.call(key)) for _ in range(2)]
        waiting = contextlib.AsyncExitStack()
        await crowd.enter_async_context(waiting)
        for _ in range(5):
            client = await waiting.enter_async_context(site.client(key))
            assert (await client.receive())["type"] == "session.queued"
        await site.fires("DuplaneTenantFloods")
        assert "bakery" in await site.follow(page, "Look")
        await site.follow(page, "Do")
        other = await crowd.enter_async_context(site.client(other_key))
        await holding[0].end()
        await other.begin()
        await other.exchange()
        await waiting.aclose()

        async def is_refused() -> bool:
            async with site.client(key) as late:
                return (await late.receive())["type"] == "error"

        await until(is_refused, WITHIN_S)
        await site.clears("DuplaneTenantFloods")
        await site.follow(page, "Over")
        for client in (other, holding[1]):
            await client.end()


async def recordings(site: Site, page: str, step: str) -> list[dict[str, Any]]:
    """Follow a step of a page that lists the recordings; return the list, newest first."""
    return orjson.loads(await site.follow(page, step))["sessions"]


@drill("disk-full", "DuplaneRecordingsStop")
async def disk_full(folder: Path) -> None:
    """Record to a disk of 3 MB."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("the drill disk-full mounts a disk: it needs root and unshare")
    page = "disk-full"
    command = (*_SMALL_DISK, "SITE/recordings", *DUPLANE)
    async with with_keys(folder, *_RECORD_FLAGS, edge_command=command) as site:
        key, query = key_of(folder, "bakery"), "mode=audio&recording=on"
        async with site.call(key, query) as client:
            for _ in range(4):
                await client.exchange()
            await client.end()
        async with site.call(key, query) as client:
            firing = asyncio.ensure_future(site.fires("DuplaneRecordingsStop"))
            while not firing.done():
                await client.exchange()
                await asyncio.wait({firing}, timeout=0.2)
            await firing
            await client.end()
        full, old = await recordings(site, page, "Look")
        site.environment["OLD_RECORDING"] = old["session_id"]
        await site.follow(page, "Do")
        async with site.call(key, query) as client:
            await client.end()

        async def is_recorded() -> bool:
            newest, *_ = await recordings(site, page, "Over")
            assert newest["session_id"] != full["session_id"]
            return newest.get("is_incomplete") is False

        await until(is_recorded, WITHIN_S)


@drill("erase-one-person")
async def erase_one_person(folder: Path) -> None:
    """Record two persons of one tenant, and erase one of them."""
    page = "erase-one-person"
    async with with_keys(folder, *_RECORD_FLAGS) as site:
        for subject in ("user-7", "user-8"):
            token = await token_of(site, key_of(folder, "bakery"), subject)
            async with site.call(query=f"mode=audio&token={token}") as client:
                await client.end()

        async def are_recorded() -> bool:
            return len(await recordings(site, page, "Look")) == 2

        await until(are_recorded, WITHIN_S)
        site.environment["PERSON"] = "user-7"
        erased = orjson.loads(await site.follow(page, "Do"))["erased"]
        assert len(erased) == 1
        await site.follow(page, "Over")
        (left,) = await recordings(site, page, "Look")
        assert left["session_id"] not in erased


async def token_of(site: Site, key: str, subject: str) -> str:
    """Return an ephemeral token, with which a person's session is recorded."""
    url = f"{site.environment['EDGE']}/v1/realtime/client_secrets"
    asked = {"session": {"mode": "audio"}, "subject": subject, "record": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(url, json=asked) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return (await answer.json())["value"]
