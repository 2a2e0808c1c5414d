"""The admin token of operators, from a file or, for one more release, from a flag."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.edge.credential_rig import answer, bearer
from support.edge.live_edge import live_edge
from support.time_limits import WITHIN_S

from duplane.edge import server
from duplane.edge.settings import EdgeSettings
from duplane.fabric.process import Shutdown, StartError


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("from-the-file\n")
    return path


async def test_token_of_the_file_makes_an_operator(token_file: Path) -> None:
    async with live_edge(admin_token_file=token_file) as edge:
        for token, code in (("from-the-file", 200), ("another", 403)):
            assert (await answer(edge, "GET", "/workers", headers=bearer(token)))[0] == code
        assert (await answer(edge, "GET", "/workers"))[0] == 403  # being local is not enough


@pytest.fixture
def public_file(token_file: Path) -> Path:
    token_file.chmod(0o644)
    return token_file


async def test_file_that_others_can_read_is_refused(public_file: Path) -> None:
    with pytest.raises(StartError, match="admin_token_file: other users may read"):
        async with live_edge(admin_token_file=public_file):
            pass


def test_file_and_flag_contradict_each_other(token_file: Path) -> None:
    with pytest.raises(ValueError, match="admin_token and admin_token_file"):
        EdgeSettings(admin_token="a", admin_token_file=token_file)


async def test_token_in_a_flag_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_announced = asyncio.Event()
    monkeypatch.setattr(server, "announce", lambda *_: is_announced.set())
    settings = EdgeSettings(
        listen="127.0.0.1:0", schedulers=("127.0.0.1:1",), admin_token="of-the-flag"
    )
    shutdown = Shutdown()
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(settings, shutdown))
        await is_announced.wait()
        shutdown.drain()
        await serving
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([text for text in said if "--admin-token-file" in text]) == 1
    assert "of-the-flag" not in caplog.text
