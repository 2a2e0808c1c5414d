"""GET /v1/models, and the one rule for the name of a model: real scheduler, workers by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
import pytest
from support.edge.callers import NamedCallers, as_caller
from support.fabric.in_process import running_edge
from support.scheduler.scheduler_harness import SchedulerHarness
from support.time_limits import WITHIN_S
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from duplane.edge.http.model_routes import model_names
from duplane.fabric.v1 import admin_pb2, model_pb2, registry_pb2

ASK = {"messages": [{"role": "user", "content": "Hi"}]}


class Client:
    """Sends requests to an edge as a tenant."""

    def __init__(self, address: str, http: aiohttp.ClientSession) -> None:
        self.address = address
        self._http = http

    async def ask(self, method: str, path: str, **request: Any) -> tuple[int, Any]:
        url = f"http://{self.address}{path}"
        headers = as_caller("tenant")
        async with self._http.request(method, url, headers=headers, **request) as answer:
            return answer.status, await answer.json()

    async def names(self) -> list[str]:
        code, told = await self.ask("GET", "/v1/models")
        assert code == 200
        assert told.keys() == {"object", "data"}
        return [model["id"] for model in told["data"]]


@contextlib.asynccontextmanager
async def client_of(
    models: Mapping[str, Mapping[str, str]], **settings: Any
) -> AsyncGenerator[Client]:
    """Run a scheduler and an edge; each worker is named, and has its labels."""
    async with SchedulerHarness.running() as scheduler:
        for port, (name, labels) in enumerate(models.items(), 7000):
            await scheduler.worker(name, labels=dict(labels), address=f"10.0.0.5:{port}")
        async with (
            running_edge(scheduler.address, authenticator=NamedCallers(), **settings) as edge,
            aiohttp.ClientSession() as http,
        ):
            yield Client(edge.address, http)


async def test_models_are_listed_once_and_by_name_only() -> None:
    workers = {"worker-1": {"model": "b"}, "worker-2": {"model": "a"}, "worker-3": {"model": "b"}}
    async with client_of(workers) as client:
        assert await client.ask("GET", "/v1/models") == (
            200,
            {
                "object": "list",
                "data": [
                    {"id": "a", "object": "model", "created": 0, "owned_by": "duplane"},
                    {"id": "b", "object": "model", "created": 0, "owned_by": "duplane"},
                ],
            },
        )
        code, told = await client.ask("GET", "/v1/models/b")
        assert (code, told["id"]) == (200, "b")


async def test_any_name_means_the_only_model() -> None:
    async with client_of({"w": {"model": "openbmb/MiniCPM-o"}}) as client:
        for name in ("openbmb%2FMiniCPM-o", "openbmb/MiniCPM-o", "gpt-4o"):
            code, told = await client.ask("GET", f"/v1/models/{name}")
            assert (code, told["id"]) == (200, "openbmb/MiniCPM-o")


async def test_name_that_none_of_several_models_has_is_refused_with_the_names() -> None:
    async with client_of({"w1": {"model": "a"}, "w2": {"model": "b"}}) as client:
        for method, path, body in (
            ("GET", "/v1/models/gpt-4o", {}),
            ("POST", "/v1/chat/completions", {"json": {**ASK, "model": "gpt-4o"}}),
            ("POST", "/v1/chat/completions?model=gpt-4o", {"json": ASK}),
        ):
            code, told = await client.ask(method, path, **body)
            assert code == 404
            assert told["error"] == {
                "message": "no worker serves the model 'gpt-4o'; served are: a, b",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }


APPEND = json.dumps({"type": "input_audio_buffer.append", "audio": "AAAA" * 16_000})


@pytest.mark.parametrize(
    ("path", "opening"),
    [
        ("/v1/realtime?mode=audio&model=gpt-4o", []),
        ("/v1/realtime?model=gpt-4o", [APPEND]),  # E asks for a slot when it has sound
        ("/openai/v1/realtime?model=gpt-4o", [APPEND]),
        ("/v1/live/sessions?model=gpt-4o", []),
        ("/ws/duplex/adx_1?model=gpt-4o", []),
    ],
    ids=["A", "E", "E-path", "L", "C"],
)
async def test_the_rule_is_the_same_for_every_dialect(path: str, opening: list[str]) -> None:
    async with (
        client_of({"w1": {"model": "a"}, "w2": {"model": "b"}}) as client,
        connect(
            f"ws://{client.address}{path}",
            additional_headers=as_caller("tenant"),
            compression=None,
            proxy=None,
        ) as socket,
    ):
        told: list[str] = []
        for event in opening:
            await socket.send(event)
        with contextlib.suppress(ConnectionClosed):
            async with asyncio.timeout(WITHIN_S):
                async for event in socket:
                    told.append(str(event))
    assert "no worker serves the model 'gpt-4o'; served are: a, b" in told[-1]
    assert socket.close_code == 1013


async def test_without_workers_no_model_is_listed() -> None:
    async with client_of({}) as client:
        assert await client.names() == []
        assert (await client.ask("GET", "/v1/models/a"))[0] == 404


async def test_edge_lists_only_models_that_its_sessions_can_get() -> None:
    workers = {
        "w1": {"model": "a", "zone": "x"},
        "w2": {"model": "b", "zone": "x"},
        "w3": {"model": "c", "zone": "y"},
    }
    async with client_of(workers, needs=("zone=x", "model=b")) as client:
        assert await client.names() == ["a", "b"]
        for asked, got in (("a", "a"), ("c", "b"), ("gpt-4o", "b")):
            assert (await client.ask("GET", f"/v1/models/{asked}"))[1]["id"] == got


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/a"])
async def test_without_a_scheduler_the_refusal_has_the_form_of_openai(path: str) -> None:
    async with (
        running_edge("127.0.0.1:1", authenticator=NamedCallers()) as edge,
        aiohttp.ClientSession() as http,
    ):
        client = Client(edge.address, http)
        code, told = await client.ask("GET", path)
        assert (code, told["error"]["code"]) == (503, "server_busy")


def worker(pool: str = "", *, is_lost: bool = False, **labels: str) -> admin_pb2.WorkerStatus:
    register = registry_pb2.Register(
        pool=pool, labels=labels, model=model_pb2.Model(name="described")
    )
    status = admin_pb2.WorkerStatus(worker=register)
    if is_lost:
        status.lost_duration.SetInParent()
    return status


def test_only_attached_workers_of_the_pool_count() -> None:
    workers = [worker(model="a"), worker("other", model="b"), worker(is_lost=True, model="c")]
    assert model_names(workers, "", {}) == ["a"]
    assert model_names(workers, "other", {}) == ["b"]


def test_description_names_the_model_if_no_worker_has_the_label() -> None:
    assert model_names([worker(), worker()], "", {}) == ["described"]
    assert model_names([worker(), worker(model="a")], "", {}) == ["a"]
