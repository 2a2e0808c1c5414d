"""The event loop of the async tests is that of the product."""

from __future__ import annotations

import asyncio

import pytest
import uvloop


@pytest.fixture
async def loop_of_fixtures() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def test_async_tests_and_fixtures_share_a_uvloop(
    loop_of_fixtures: asyncio.AbstractEventLoop,
) -> None:
    assert isinstance(loop_of_fixtures, uvloop.Loop)
    assert asyncio.get_running_loop() is loop_of_fixtures
