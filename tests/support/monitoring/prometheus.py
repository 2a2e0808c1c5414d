"""A real Prometheus with the rules and the configuration of `deploy/`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from support.debian_programs import debian_program
from support.paths import ROOT
from support.ports import free_ports

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "rules.yml"


def prometheus_program(name: str) -> str:
    return debian_program(name, "prometheus")


class Prometheus:
    """A real Prometheus that scrapes a fabric every half second."""

    def __init__(self, address: str, client: aiohttp.ClientSession) -> None:
        self.address = address
        self._client = client

    async def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}"
        async with self._client.get(url, params=parameters) as response:
            answer = await response.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def values(self, expression: str) -> list[float]:
        found = await self.get("query", query=expression)
        return [float(each["value"][1]) for each in found["result"]]

    async def until(self, expression: str, expected: Sequence[float], within_s: float) -> None:
        """Wait until an expression has exactly the expected results."""
        async with asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if await self.values(expression) == list(expected):
                        return
                await asyncio.sleep(0.1)

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, targets: Sequence[str], directory: Path) -> AsyncGenerator[Prometheus]:
        """Scrape `targets` (HOST:PORT) as the configuration says, but more often."""
        settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        settings["rule_files"] = [str(RULES)]
        (job,) = settings["scrape_configs"]
        job["static_configs"] = [{"targets": list(targets)}]
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(settings))
        (port,) = free_ports(1)
        address = f"127.0.0.1:{port}"
        process = await asyncio.create_subprocess_exec(
            *(prometheus_program("prometheus"), f"--config.file={file}"),
            f"--storage.tsdb.path={directory / 'data'}",
            *(f"--web.listen-address={address}", "--log.level=error"),
        )
        try:
            async with aiohttp.ClientSession() as client:
                yield cls(address, client)
        finally:
            process.terminate()
            await process.wait()
