"""The modules of the pages that know no page."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from support.time_limits import WITHIN_S


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("page", ["operator", "talk"])
async def test_modules_of_the_page(page: str) -> None:
    program = await asyncio.create_subprocess_exec(
        *("node", "--test", str(Path(__file__).with_name(f"{page}.test.mjs"))),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            output, _ = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    assert program.returncode == 0, output.decode()
