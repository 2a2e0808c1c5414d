"""Secrets in the environment of `duplane up` are in no process that does not need them."""

from __future__ import annotations

import sys

import psutil
import pytest
from support.fabric.real_fabric import RealFabric

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
        assert [line[3] for line in knowing] == ["edge"]
        assert not [one for one in started if TOKEN in " ".join(one.cmdline())]
        # A core dump would contain the token, and what clients say.
        assert {one.rlimit(psutil.RLIMIT_CORE) for one in started} == {(0, 0)}
