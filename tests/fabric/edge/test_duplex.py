"""/ws/duplex on a live edge: the kind of session that a path selects, answers and refusals."""

from __future__ import annotations

import asyncio

import pytest
from support.edge.live_edge import AUDIO, closed, live_edge, receive, send
from websockets.exceptions import InvalidStatus

from duplane.edge.settings import Limits
from duplane.fabric.v1 import lease_pb2

CHUNK = {"type": "audio_chunk", "audio_base64": AUDIO}


@pytest.mark.parametrize(
    ("path", "kind", "client_id"),
    [
        ("/ws/duplex/adx_1", lease_pb2.SESSION_KIND_AUDIO_DUPLEX, "adx_1"),
        ("/ws/duplex/omni_1", lease_pb2.SESSION_KIND_OMNI_DUPLEX, "omni_1"),
        ("/ws/duplex/a b", lease_pb2.SESSION_KIND_OMNI_DUPLEX, "a_b"),
    ],
)
async def test_the_session_id_says_what_kind_of_slot_is_asked_for(
    path: str, kind: lease_pb2.SessionKind, client_id: str
) -> None:
    async with live_edge() as edge, edge.connect_to(path) as client:
        acquisition = await edge.fabric.acquisition()
        assert (acquisition.request.kind, acquisition.request.client_id) == (kind, client_id)
        assert await receive(client) == {"type": "queue_done"}
        await send(client, {"type": "stop"})
        assert await receive(client) == {"type": "stopped"}
        await closed(client, 1000)


async def test_two_clients_with_one_id_are_two_sessions() -> None:
    async with (
        live_edge(slot_count=2) as edge,
        edge.connect_to("/ws/duplex/same") as one,
        edge.connect_to("/ws/duplex/same") as other,
    ):
        for client in (one, other):
            assert await receive(client) == {"type": "queue_done"}
            await send(client, {"type": "prepare"})
            assert (await receive(client))["type"] == "prepared"
        ids = [(await edge.fabric.acquisition()).request.session_id for _ in range(2)]
        assert len(set(ids)) == 2
        for client in (one, other):
            for count in range(1, 4):
                await send(client, CHUNK)
                assert (await receive(client))["current_time"] == count


async def test_a_burst_of_chunks_has_one_result_each() -> None:
    async with live_edge() as edge, edge.connect_to("/ws/duplex/adx_1") as client:
        assert await receive(client) == {"type": "queue_done"}
        await send(client, {"type": "prepare"})
        assert (await receive(client))["type"] == "prepared"
        await asyncio.gather(*(send(client, CHUNK) for _ in range(100)))
        results = [await receive(client) for _ in range(100)]
        assert [result["current_time"] for result in results] == [*range(1, 101)]


async def test_a_full_edge_refuses_in_flat_text() -> None:
    async with (
        live_edge(Limits(session_count=0)) as edge,
        edge.connect_to("/ws/duplex/x") as client,
    ):
        assert await receive(client) == {"type": "error", "error": "too many sessions"}
        await closed(client, 1013)


async def test_a_path_without_a_session_id_is_not_found() -> None:
    async with live_edge() as edge:
        with pytest.raises(InvalidStatus, match="404"):
            async with edge.connect_to("/ws/duplex/"):
                pass


@pytest.mark.parametrize(("query", "model"), [("", ""), ("?model=b", "b")])
async def test_session_needs_the_labels_of_the_edge_and_asks_for_the_model_of_its_url(
    query: str, model: str
) -> None:
    async with (
        live_edge(needs=("zone=x", "model=a")) as edge,
        edge.connect_to(f"/ws/duplex/adx_1{query}") as client,
    ):
        acquisition = await edge.fabric.acquisition()
        assert dict(acquisition.request.needs) == {"zone": "x", "model": "a"}
        assert acquisition.request.model == model
        assert await receive(client) == {"type": "queue_done"}
        await send(client, {"type": "stop"})
        assert await receive(client) == {"type": "stopped"}
        await closed(client, 1000)
