"""Asks the health listener of a process, as probes do."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

PROBES = ("livez", "readyz", "startupz")


async def probed(url: str) -> dict[str, int]:
    """Return the status codes of all probes by their names."""
    found: dict[str, int] = {}
    async with aiohttp.ClientSession() as client:
        for probe in PROBES:
            async with client.get(f"{url}/{probe}") as response:
                found[probe] = response.status
    return found


def codes(*, live: bool, ready: bool, started: bool = True) -> dict[str, int]:
    """Return the status codes of all probes in a state of a process."""
    states = zip(PROBES, (live, ready, started), strict=True)
    return {probe: 200 if is_well else 503 for probe, is_well in states}


async def status(url: str) -> dict[str, Any]:
    """Return the answer of `/status`."""
    async with aiohttp.ClientSession() as client, client.get(f"{url}/status") as response:
        return await response.json()


def health_url(caplog: pytest.LogCaptureFixture) -> str:
    """Return the address that the log names; empty before the process listens there."""
    said = (record.getMessage() for record in reversed(caplog.records))
    return next((text.split()[-1] for text in said if text.startswith("health at ")), "")
