"""The keys that schedulers publish in every lease store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import pytest
from support.time_limits import WITHIN_S

from duplane.fabric.lease_signing import LeaseSigner
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.store.base import LeaseStore
from duplane.scheduler.store.etcd import session
from duplane.scheduler.store.opening import open_store

OLD, NEW = (LeaseSigner().verification_key for _ in range(2))


class Published:
    """The keys that a store has published last."""

    def __init__(self, store: LeaseStore) -> None:
        self._keys: set[str] = set()
        self._has_changed = asyncio.Event()
        store.watch_keys(self._on_keys)

    def _on_keys(self, keys: Sequence[registry_pb2.VerificationKey]) -> None:
        self._keys = {key.key_id for key in keys}
        self._has_changed.set()

    async def are(self, *keys: registry_pb2.VerificationKey) -> None:
        async with asyncio.timeout(WITHIN_S):
            while self._keys != {key.key_id for key in keys}:
                self._has_changed.clear()
                await self._has_changed.wait()


@contextlib.asynccontextmanager
async def running(store: LeaseStore) -> AsyncGenerator[None]:
    task = asyncio.create_task(store.run())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_shared_keys_are_published_and_replaced(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "KEY_TTL_S", 2)
    store = open_store(store_url, 1)
    published = Published(store)
    store.share_keys([OLD])
    async with running(store):
        await published.are(OLD)
        store.share_keys([OLD, NEW])
        await published.are(OLD, NEW)
        store.share_keys([NEW])
        await published.are(NEW)
