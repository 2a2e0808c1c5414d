"""Operators delete recordings over HTTP, and clients learn whether they are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from support.edge.live_edge import UPDATE, begin, end, exchange, live_edge, receive, send

from duplane.edge.access import Caller, CallerKind
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import STREAM, Meta, read_meta, recordings, write_meta
from duplane.fabric.v1 import lease_pb2


def stored(root: Path, name: str, **identity: str) -> None:
    directory = root / name
    directory.mkdir()
    (directory / STREAM).touch()
    write_meta(directory, Meta(name, "/v1/realtime", "audio", 0.0, identity=identity))


def names(root: Path) -> list[str]:
    return sorted(directory.name for directory in recordings(root))


def left_in(root: Path) -> list[Path]:
    return list(root.iterdir())


@pytest.mark.parametrize(("wish", "is_recorded"), [("", False), ("&recording=on", True)])
async def test_a_client_is_recorded_on_request_and_learns_it_first(
    tmp_path: Path, wish: str, is_recorded: bool
) -> None:
    async with (
        live_edge(recording=RecordingSettings(tmp_path)) as edge,
        edge.connect(f"?mode=audio{wish}") as client,
    ):
        first = await receive(client)
        await send(client, UPDATE)
        created = await receive(client)
        await end(client)
    assert (first["type"], first["recording"]) == ("session.queue_done", is_recorded)
    assert created["recording"] is is_recorded
    assert bool(recordings(tmp_path)) is is_recorded


async def test_a_waiting_client_learns_it_with_its_first_position(tmp_path: Path) -> None:
    settings = RecordingSettings(tmp_path, Consent.UNLESS_REFUSED)
    async with live_edge(recording=settings) as edge:
        edge.fabric.is_automatic = False
        async with edge.connect() as client:
            waiting = await edge.fabric.acquisitions.get()
            for position in (2, 1):
                waiting.queued(lease_pb2.Queued(position=position, queue_length=2))
            queued, update = [await receive(client) for _ in range(2)]
            await end(client)
    assert (queued["type"], queued["recording"]) == ("session.queued", True)
    assert (update["type"], "recording" in update) == ("session.queue_update", False)


class OneCaller:
    """Accepts everybody as one caller."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    async def authenticate(self, request: web.Request) -> Caller:
        del request
        return self.caller


@pytest.mark.parametrize("query", ["", "&recording=on", "&recording=off"])
@pytest.mark.parametrize("may_record", [True, False])
async def test_a_credential_decides_and_its_user_is_in_the_recording(
    tmp_path: Path, query: str, may_record: bool
) -> None:
    caller = Caller(CallerKind.TENANT, tenant="bakery", subject="u1", may_record=may_record)
    settings = RecordingSettings(tmp_path)
    async with (
        live_edge(recording=settings, authenticator=OneCaller(caller)) as edge,
        edge.connect(f"?mode=audio{query}") as client,
    ):
        assert (await receive(client))["recording"] is may_record
        await send(client, UPDATE)
        await receive(client)
        await end(client)
    metas = [meta for each in recordings(tmp_path) if (meta := read_meta(each))]
    users = [(meta.identity["tenant"], meta.identity["subject"]) for meta in metas]
    assert users == [("bakery", "u1")] * may_record


async def test_a_client_learns_that_an_edge_cannot_record_it_as_its_credential_demands() -> None:
    caller = Caller(CallerKind.TENANT, may_record=True)
    async with live_edge(authenticator=OneCaller(caller)) as edge, edge.connect() as client:
        assert (await receive(client))["recording"] is False
        await end(client)


async def test_an_edge_that_does_not_record_says_nothing_new() -> None:
    async with live_edge() as edge, edge.connect("?mode=audio&recording=on") as client:
        assert await receive(client) == {"type": "session.queue_done"}
        await send(client, UPDATE)
        assert "recording" not in await receive(client)
        await end(client)


async def test_a_running_recording_is_deleted_and_its_session_continues(tmp_path: Path) -> None:
    settings = RecordingSettings(tmp_path, Consent.ALWAYS)
    async with (
        live_edge(recording=settings) as edge,
        edge.connect() as client,
        edge.asked() as http,
    ):
        await begin(client)
        await exchange(client)
        (name,) = names(tmp_path)
        assert await http.ask("DELETE", f"/api/sessions/{name}/recording") == (
            200,
            {"success": True},
        )
        assert (await http.ask("DELETE", f"/api/sessions/{name}/recording"))[0] == 404
        await exchange(client)
        await end(client)
    assert not left_in(tmp_path)


async def test_all_recordings_of_one_person_are_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, "sess_1", tenant="bakery", subject="u 1")
    stored(tmp_path, "sess_2", tenant="library", subject="u 1")
    stored(tmp_path, "sess_3", tenant="library", subject="u2")
    async with live_edge(recording=RecordingSettings(tmp_path)) as edge, edge.asked() as http:
        for query, code, named in (
            ("", 400, "subject"),
            ("?subject=", 400, "subject"),
            ("?subject=a&subject=b", 400, "subject"),
            ("?subject=u%201", 409, "tenant"),
            ("?subject=u%201&tenant=a&tenant=b", 400, "tenant"),
        ):
            answered, body = await http.ask("DELETE", f"/api/sessions{query}")
            assert (answered, named in body["detail"]) == (code, True), query
        assert len(names(tmp_path)) == 3
        caplog.set_level("INFO", logger="duplane.audit")
        erased = await http.ask("DELETE", "/api/sessions?subject=u%201&tenant=library")
        assert "erased=1" in caplog.text
        assert "u 1" not in caplog.text
        assert erased == (200, {"success": True, "erased": ["sess_2"]})
        assert names(tmp_path) == ["sess_1", "sess_3"]
        erased = await http.ask("DELETE", "/api/sessions?subject=u%201")
        assert erased == (200, {"success": True, "erased": ["sess_1"]})
        erased = await http.ask("DELETE", "/api/sessions?subject=u%201")
        assert erased == (200, {"success": True, "erased": []})


async def test_only_operators_delete(tmp_path: Path) -> None:
    stored(tmp_path, "sess_1", subject="u1")
    async with (
        live_edge(recording=RecordingSettings(tmp_path), admin_token="secret") as edge,
        edge.asked() as http,
    ):
        for path in ("/sess_1/recording", "?subject=u1"):
            assert (await http.ask("DELETE", f"/api/sessions{path}"))[0] in (401, 403)
    assert names(tmp_path) == ["sess_1"]
