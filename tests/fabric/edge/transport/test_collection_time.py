"""A garbage collection in the middle of a client's message does not use up this client's quota."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
from aiohttp import web
from support.edge.live_edge import begin, end, exchange, live_edge

from duplane.edge.session.session import Session
from duplane.edge.transport.client_protocol import ClientProtocol

pytestmark = pytest.mark.timing

_COLLECTION_S = 0.2  # with the default share of a core, the quota would allow 0.05 s


@pytest.mark.parametrize(
    ("owner", "name"),
    [(web.RequestHandler, "data_received"), (Session, "decode")],
    ids=["while frames are parsed", "while the message is handled"],
)
async def test_next_message_is_read_without_a_wait(
    owner: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []

    async def wait_lost(_: ClientProtocol, timeout_s: float) -> None:
        waits_s.append(timeout_s)

    def wait_for_quota(_: ClientProtocol, wait_s: float) -> None:
        waits_s.append(wait_s)

    collected: list[str] = []
    original: Callable[..., Any] = getattr(owner, name)

    def with_collection(*arguments: Any) -> Any:
        gc.collect()
        collected.append(name)
        return original(*arguments)

    async with live_edge() as edge, edge.connect() as client:
        await begin(client)
        await exchange(client)
        with monkeypatch.context() as patch, _slow_collections():
            patch.setattr(owner, name, with_collection)
            patch.setattr(ClientProtocol, "wait_lost", wait_lost)
            patch.setattr(ClientProtocol, "_wait_for_quota", wait_for_quota)
            await exchange(client)
            await exchange(client)
        await end(client)
    assert len(collected) >= 2
    assert waits_s == []


@contextlib.contextmanager
def _slow_collections() -> Generator[None]:
    """Let each collection use as much CPU time as a collection of a busy edge."""

    def use_time(phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            end_s = time.thread_time() + _COLLECTION_S
            while time.thread_time() < end_s:
                pass

    gc.callbacks.append(use_time)
    try:
        yield
    finally:
        gc.callbacks.remove(use_time)
