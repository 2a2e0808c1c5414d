"""The way of a delta through the edge stays short."""

from __future__ import annotations

from support.edge.delta_path import delta_path

MOST = 22  # each function here runs once per unit of each session


async def test_speaking_delta_passes_few_functions_of_the_edge() -> None:
    names = await delta_path()
    assert names[-1] == "transport.websocket:WebSocket.send"
    assert len(names) <= MOST, names
