"""Clients of other projects, in processes of their own; `make clients` installs their packages.

A process of its own is needed because messages about settings change once pydantic is imported.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from support.paths import ROOT
from support.time_limits import WITHIN_S

SCRIPTS = ROOT / "tests/clients"
PYTHON = ROOT / ".clients/bin/python"

# A client imports large packages and waits for many units, so a loaded machine needs more time.
_WITHIN_S = 4 * WITHIN_S

needs_python_clients = pytest.mark.skipif(
    not (ROOT / ".clients/.installed").exists(), reason="clients for Python: run make clients"
)
needs_node_clients = pytest.mark.skipif(
    not (SCRIPTS / "node_modules/.installed").exists(), reason="clients for Node: run make clients"
)


async def run_client(script: str, *arguments: str, given: bytes = b"", **environment: str) -> bytes:
    """Run a script of tests/clients with `given` as its input; return what it writes."""
    program = "node" if script.endswith(".mjs") else str(PYTHON)
    client = await asyncio.create_subprocess_exec(
        *(program, str(SCRIPTS / script), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"NO_PROXY": "*"} | environment,
    )
    try:
        async with asyncio.timeout(_WITHIN_S):
            output, errors = await client.communicate(given)
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    assert client.returncode == 0, errors.decode()
    return output


async def checked_kinds(protocol: str, events: Sequence[bytes]) -> dict[str, Any]:
    """Check events of `live` or `realtime` by OpenAI's types.

    Returns the types of these events as `server`, and those of all client events as `client`.
    """
    return orjson.loads(await run_client("check_events.py", protocol, given=b"\n".join(events)))
