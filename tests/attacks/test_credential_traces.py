"""No credential is left in a log line, a span, a metric, a recording or a close reason."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from support.edge.credential_rig import (
    KeyStore,
    answer,
    bearer,
    carriers,
    connected,
    make_token,
    refusal,
)
from support.edge.jwt_issuer import AUDIENCE, ISSUER, JwtIssuer
from support.edge.live_edge import begin, end, exchange, live_edge

from duplane.edge.credentials.keys import KEY_PREFIX, new_key
from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.fabric.monitoring.spans import Telemetry


def contents(directory: Path) -> bytes:
    """Return the names and the contents of all files in a directory."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return b"".join(str(path).encode() + path.read_bytes() for path in files)


async def test_credentials_leave_no_trace(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="duplane")
    exported = InMemorySpanExporter()
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    store = KeyStore(tmp_path)
    good, bad = store.new(), new_key()
    secrets = {good.text, bad.text}
    async with (
        JwtIssuer().serving() as issuer,
        live_edge(
            telemetry=Telemetry("edge", SimpleSpanProcessor(exported)),
            recording=RecordingSettings(recordings, consent=Consent.ALWAYS),
            admin_token="A-0123456789",
            credentials=CredentialSettings(
                api_keys=store.path, jwks=issuer.url, jwt_issuer=ISSUER, jwt_audience=AUDIENCE
            ),
        ) as edge,
    ):
        tokens = [issuer.token(), await make_token(edge, good.text), "A-0123456789"]
        secrets.update(tokens)
        accepted = [*carriers(edge, good.text).values(), *map(carried, tokens)]
        in_url = await make_token(edge, good.text)
        secrets.add(in_url)
        path = f"/v1/realtime?mode=audio&token={in_url}&client_id=caller-7"
        openings: list[dict[str, Any]] = [*accepted, {"path": path}]
        for how in openings:
            async with connected(edge, **how) as client:
                await begin(client)
                await exchange(client)
                await end(client)
        for how in (*carriers(edge, bad.text).values(), carried(in_url)):
            assert await refusal(edge, **how) == 401
        assert await refusal(edge, f"/v1/realtime?token={bad.text}") == 400
        forms = (f"/api/presets?token={in_url}", f"/none?token={in_url}")
        told = [await answer(edge, "GET", path, headers=bearer(bad.text)) for path in forms]
        metrics = generate_latest(edge.edge.metrics.registry)
    recorded = await asyncio.to_thread(contents, recordings)
    lines = [
        f"{record.getMessage()} {record.exc_text or ''}"
        for record in caplog.records
        if not record.name.startswith(("websockets.client", "aiohttp.client"))
    ]
    spans = [span.to_json() for span in exported.get_finished_spans()]
    assert lines
    assert spans
    assert b"caller-7" in recorded
    assert b"duplane_" in metrics
    for secret in secrets:
        part = secret_part(secret)
        assert not [line for line in lines if part in line]
        assert not [span for span in spans if part in span]
        assert part.encode() not in recorded
        assert part.encode() not in metrics
        assert part not in str(told)


def secret_part(credential: str) -> str:
    """Return what nobody may learn of a credential: of a key, the secret without its id."""
    part = credential.rpartition("_")[2] if credential.startswith(KEY_PREFIX) else credential
    return part[:40]


def carried(token: str) -> dict[str, Any]:
    return {"headers": bearer(token)}
