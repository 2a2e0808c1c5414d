"""The subprotocol of a WebSocket: browsers need one to be selected, and hide keys among them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.edge.live_edge import begin, end, exchange, live_edge
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.fabric.monitoring.spans import Telemetry

KEY = "K-0123456789"
KEYS = [f"map-api-key.{KEY}", f"duplane.bearer.{KEY}", f"openai-insecure-api-key.{KEY}"]


def contents(directory: Path) -> bytes:
    """Return the contents of all files in a directory."""
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


async def selected(url: str, *offered: str) -> str | None:
    """Offer subprotocols, as browsers do, and return the one that the edge selects."""
    names = [Subprotocol(name) for name in offered]
    async with connect(url, subprotocols=names, compression=None, proxy=None) as client:
        return client.subprotocol


@pytest.mark.parametrize("path", ["/v1/realtime?mode=audio", "/ws/duplex/adx_1", "/ws/chat"])
async def test_the_first_offered_name_that_the_edge_speaks_is_selected(path: str) -> None:
    async with live_edge() as edge:
        url = f"ws://{edge.edge.address}{path}"
        assert await selected(url, "map.realtime", *KEYS) == "map.realtime"
        assert await selected(url, *KEYS, "duplane.realtime") == "duplane.realtime"
        assert await selected(url, "other", "duplane.realtime", "map.realtime") == (
            "duplane.realtime"
        )


@pytest.mark.parametrize("offered", [KEYS, ["realtime", KEYS[2]], ["other"], ["MAP.REALTIME"]])
async def test_client_that_offers_only_unknown_names_gets_none_and_is_served(
    offered: list[str],
) -> None:
    names = [Subprotocol(name) for name in offered]
    async with (
        live_edge() as edge,
        connect(edge.url(), subprotocols=names, compression=None, proxy=None) as client,
    ):
        assert client.subprotocol is None
        await begin(client)
        await exchange(client)
        await end(client)


@pytest.mark.parametrize("names", [KEYS, ["map.realtime", *KEYS]], ids=["no name", "a name"])
async def test_key_reaches_no_log_span_or_recording(
    names: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="duplane")
    exported = InMemorySpanExporter()
    telemetry = Telemetry("edge", SimpleSpanProcessor(exported))
    recording = RecordingSettings(tmp_path, Consent.ALWAYS)
    offered = [Subprotocol(name) for name in names]
    async with (
        live_edge(telemetry=telemetry, recording=recording) as edge,
        connect(edge.url(), subprotocols=offered, compression=None, proxy=None) as client,
    ):
        await begin(client)
        await exchange(client)
        await end(client)
    spans = exported.get_finished_spans()
    recorded = await asyncio.to_thread(contents, tmp_path)
    logged = [record for record in caplog.records if record.name != "websockets.client"]
    assert logged
    assert spans
    assert recorded
    assert not [record for record in logged if KEY in record.getMessage()]
    assert not [span for span in spans if KEY in span.to_json()]
    assert KEY.encode() not in recorded
