"""A credential decides whether its session is recorded, and the recording names its person."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.edge.credential_rig import KeyStore, bearer, connected, make_token
from support.edge.live_edge import begin, end, live_edge

from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import Meta, read_meta


def recordings(directory: Path) -> list[Meta | None]:
    return [read_meta(path) for path in directory.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("record", "query", "is_recorded"),
    [
        (None, "", False),
        (None, "&recording=on", True),
        (True, "", True),
        (True, "&recording=off", True),
        (False, "&recording=on", False),
    ],
)
async def test_token_requires_or_forbids_a_recording(
    record: bool | None, query: str, is_recorded: bool, tmp_path: Path
) -> None:
    store = KeyStore(tmp_path)
    key = store.new("acme")
    directory = tmp_path / "recordings"
    recording = RecordingSettings(directory, consent=Consent.ON_REQUEST)
    credentials = CredentialSettings(api_keys=store.path)
    async with live_edge(credentials=credentials, recording=recording) as edge:
        token = await make_token(edge, key.text, record=record, subject="user 7")
        path = f"/v1/realtime?mode=audio&client_id=me{query}"
        async with connected(edge, path, headers=bearer(token)) as client:
            await begin(client)
            await end(client)
    found = await asyncio.to_thread(recordings, directory)
    identities = [meta.identity for meta in found if meta]
    assert len(identities) == is_recorded
    for identity in identities:
        assert (
            identity.items() >= {"client_id": "me", "tenant": "acme", "subject": "user 7"}.items()
        )
