"""The Realtime client of `openai` for Node, which insists on TLS, at a live edge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest
from support.certificates import write_certificate
from support.client_packages import (
    checked_kinds,
    needs_node_clients,
    needs_python_clients,
    run_client,
)
from support.edge.live_edge import live_edge
from support.protocols.transcripts import pcm

from duplane.fabric.v1 import session_pb2


def speaks_once(unit: session_pb2.Unit) -> Sequence[session_pb2.ConverseResponse]:
    """Speak in the second unit, and listen to all others."""
    delta = session_pb2.Delta(sequence=unit.sequence, listen=session_pb2.Listen())
    if unit.sequence == 1:
        delta.speech.text, delta.speech.audio = "the sky is blue", pcm(24_000)
        delta.end_of_turn = True
    return [session_pb2.ConverseResponse(delta=delta)]


@pytest.mark.slow
@needs_node_clients
@needs_python_clients  # which have the types of all events
async def test_the_client_for_node_hears_the_model(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, "edge")
    sound = tmp_path / "sound.pcm"
    sound.write_bytes(bytes(2 * 3 * 24_000))
    async with live_edge(tls_cert=chain, tls_key=key) as edge:
        edge.fabric.on_unit = speaks_once
        port = edge.edge.address.rpartition(":")[2]
        url = f"https://127.0.0.1:{port}/v1"
        output = await run_client(
            "openai_realtime.mjs", url, str(sound), NODE_EXTRA_CA_CERTS=str(chain)
        )
    *events, told = output.splitlines()
    assert orjson.loads(told) == {"answers": ["the sky is blue"], "faults": []}
    assert "response.output_audio.delta" in (await checked_kinds("realtime", events))["server"]
