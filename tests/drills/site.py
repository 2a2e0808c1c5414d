"""The fabric of a drill, which is operated with the commands of the runbook."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from drills import supervisor
from support.fabric.real_fabric import Client
from support.fabric.servers import DUPLANE
from support.monitoring.prometheus import RULES, Prometheus
from support.paths import ROOT
from support.ports import free_ports
from support.time_limits import until
from websockets.asyncio.client import connect

RUNBOOK = ROOT / "docs" / "runbook.md"
WITHIN_S = 60.0
WORKERS = ("worker1", "worker2", "worker3")
_BLOCK = re.compile(r"^\*\*(?P<step>Look|Do|Over)\b.*?\n```sh\n(?P<text>.*?)^```$", re.M | re.S)


def pages() -> dict[str, str]:
    """Return the text of each page of the runbook, by its anchor."""
    parts = re.split(r"^## (.+)$", RUNBOOK.read_text(), flags=re.M)[1:]
    titles, texts = parts[::2], parts[1::2]
    return {
        title.lower().replace(" ", "-"): text for title, text in zip(titles, texts, strict=True)
    }


def commands(page: str) -> dict[str, str]:
    """Return the commands of a page, by its steps `Look`, `Do` and `Over`."""
    return {match["step"]: match["text"] for match in _BLOCK.finditer(pages()[page])}


class Site:
    """Processes with metrics, a Prometheus that scrapes them, and a shell for commands."""

    def __init__(self, folder: Path, prometheus: Prometheus, edge: str) -> None:
        self.folder = folder
        self.prometheus = prometheus
        self.edge = edge
        self.environment = {
            **os.environ,
            "PATH": f"{_programs(folder)}:{os.environ['PATH']}",
            "EDGE": f"http://{self.edge}",
            "SITE": str(folder),
        }

    async def shell(self, text: str) -> str:
        """Run commands as an operator types them; return what they print."""
        running = await asyncio.create_subprocess_exec(
            *("sh", "-e", "-c", text),
            cwd=self.folder,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await running.communicate())[0].decode()
        if running.returncode:
            raise AssertionError(f"exit code {running.returncode} of\n{text}\n{output}")
        return output

    async def follow(self, page: str, step: str) -> str:
        """Run the commands of one step of a page."""
        return await self.shell(commands(page)[step])

    def kill(self, *names: str) -> None:
        for name in names:
            supervisor.kill(self.folder, name)

    async def status(self) -> dict[str, Any]:
        """Return the state of the fabric, as `duplane status` sees it; empty without an answer."""
        with contextlib.suppress(AssertionError, orjson.JSONDecodeError):
            return orjson.loads(await self.shell("duplane status --json"))
        return {}

    async def until_ready(self, worker_count: int) -> None:
        """Wait until so many workers serve."""

        async def are_ready() -> bool:
            rows = (await self.status()).get("workers", ())
            lost = [row for row in rows if row.get("lost_duration") or row["is_silent"]]
            return len(rows) - len(lost) == worker_count

        await until(are_ready, WITHIN_S)

    async def fires(self, *alerts: str, within_s: float = WITHIN_S) -> None:
        """Wait until the expressions of all these alerts are true on the real metrics."""
        for alert in alerts:
            expression = f'count(ALERTS{{alertname="{alert}"}}) > bool 0'
            await self.prometheus.until(expression, [1.0], within_s)

    async def clears(self, *alerts: str, within_s: float = WITHIN_S) -> None:
        """Wait until none of these alerts is true."""
        for alert in alerts:
            await self.prometheus.until(f'ALERTS{{alertname="{alert}"}}', [], within_s)

    @contextlib.asynccontextmanager
    async def client(self, key: str = "", query: str = "mode=audio") -> AsyncGenerator[Client]:
        """Connect a client, which has not begun its session."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"ws://{self.edge}/v1/realtime?{query}"
        async with connect(
            url, proxy=None, max_size=None, close_timeout=1, additional_headers=headers
        ) as connection:
            yield Client(connection)

    @contextlib.asynccontextmanager
    async def call(self, key: str = "", query: str = "mode=audio") -> AsyncGenerator[Client]:
        """Hold a session; whoever has begun it ends it."""
        async with self.client(key, query) as client:
            async with asyncio.timeout(WITHIN_S):
                await client.begin()
            await client.exchange()
            yield client

    def logs(self) -> str:
        """Return the last lines of every process."""
        parts: list[str] = []
        for name in supervisor.names(self.folder):
            log = self.folder / f"{name}.log"
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            parts += [f"--- {name}", *lines[-15:]]
        return "\n".join(parts)


def _programs(folder: Path) -> Path:
    """Write the programs that the commands of the runbook call; return their folder."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    python, at = shlex.quote(sys.executable), shlex.quote(str(folder))
    tests = shlex.quote(str(supervisor.TESTS))
    texts = {"duplane": f'exec {python} -m duplane.tools "$@"'}
    for verb in ("start", "stop"):
        texts[verb] = f'PYTHONPATH={tests} exec {python} -m drills.supervisor {verb} {at} "$@"'
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return programs


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    *,
    scheduler_count: int = 1,
    worker_count: int = 2,
    store: str = "memory:",
    scheduler_flags: Sequence[str] = (),
    worker_flags: Sequence[str] = (),
    edge_flags: Sequence[str] = (),
    edge_command: Sequence[str] = DUPLANE,
    prepare: str = "",
    environment: Mapping[str, str] | None = None,
) -> AsyncGenerator[Site]:
    """Start a fabric with workers of one slot. A drill can start more of WORKERS.

    `prepare` are commands that run before the processes, and `environment` is that of the
    operator's shell. `SITE` in flags is the folder.
    """
    schedulers = [f"scheduler{number}" for number in range(1, scheduler_count + 1)]
    names = [*schedulers, *WORKERS, "edge1"]
    running_names = [*schedulers, *WORKERS[:worker_count], "edge1"]
    ports = free_ports(2 * len(names))
    addresses = [f"127.0.0.1:{port}" for port in ports]
    listen = dict(zip(names, addresses[: len(names)], strict=True))
    metrics = dict(zip(names, addresses[len(names) :], strict=True))
    at = ("--scheduler", ",".join(listen[name] for name in schedulers))
    scripted = (*at, "--checkpoint", "scripted", "--slots", "1")

    def define(name: str, role: str, *flags: str, command: Sequence[str] = DUPLANE) -> None:
        own = ("--listen", listen[name], "--metrics-listen", metrics[name])
        said = [flag.replace("SITE", str(folder)) for flag in (*command, role, *own, *flags)]
        supervisor.define(folder, name, said)

    for name in schedulers:
        define(name, "scheduler", "--store", store, *scheduler_flags)
    for name in WORKERS:
        define(name, "worker", *scripted, "--worker-id", f"worker-{name[-1]}", *worker_flags)
    define("edge1", "edge", *at, *edge_flags, command=edge_command)
    targets = [metrics[name] for name in running_names]
    async with Prometheus.running(targets, folder) as prometheus:
        site = Site(folder, prometheus, listen["edge1"])
        site.environment |= {"DUPLANE_SCHEDULER": at[1], **(environment or {})}
        try:
            if prepare:
                await site.shell(prepare)
            await asyncio.to_thread(supervisor.start_all, folder, running_names)
            await site.until_ready(worker_count)
            # Targets that were not scraped yet have no series.
            await prometheus.until("sum(up)", [float(len(targets))], WITHIN_S)
            yield site
        except BaseException:
            sys.stderr.write(site.logs())
            raise
        finally:
            site.kill(*supervisor.names(folder))


def alert_pages() -> dict[str, str]:
    """Return the `runbook_url` of each alert."""
    found = re.findall(
        r"^ +- alert: (\w+)$.*?^ +runbook_url: (\S+)$", RULES.read_text(), re.M | re.S
    )
    return dict(found)
