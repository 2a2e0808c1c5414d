"""What `duplane up` finds in its environment reaches only the processes that need it."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from support.fabric.real_fabric import DUPLANE, RealFabric

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

TOKEN = "canary-of-the-admin-token"


async def test_the_token_of_operators_reaches_only_the_edge_and_no_core_dump() -> None:
    async with RealFabric.starting("scripted", DUPLANE_ADMIN_TOKEN=TOKEN) as fabric:
        started = psutil.Process(fabric.process.pid).children(recursive=True)
        knowing = [one.cmdline() for one in started if TOKEN in one.environ().values()]
        assert len(started) >= 3
        assert [line[4] for line in knowing] == ["edge"]
        assert not [one for one in started if TOKEN in " ".join(one.cmdline())]
        # A core dump would contain the token, and what clients say.
        assert {one.rlimit(psutil.RLIMIT_CORE) for one in started} == {(0, 0)}


async def test_no_process_imports_files_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may be able to write there."""
    (tmp_path / "orjson.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    async with RealFabric.starting("scripted", (sys.executable, "-P", *DUPLANE[1:])) as fabric:
        assert len(psutil.Process(fabric.process.pid).children()) >= 3
