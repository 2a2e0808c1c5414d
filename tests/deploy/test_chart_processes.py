"""The arguments of the Helm chart are those of the real commands, and the real processes start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from support.chart import (
    EXAMPLES,
    NAMESPACE,
    Rendered,
    needs_chart_tools,
    render,
    rendered_examples,
)
from support.paths import ROOT
from support.pods import Secrets, create_missing, expanded, volumes_of
from support.ports import free_ports
from support.time_limits import WITHIN_S, until
from support.tools.command import run_command

from duplane.edge.settings import EdgeSettings
from duplane.fabric import process
from duplane.scheduler.settings import SchedulerSettings
from duplane.tools import servers
from duplane.worker.settings import WorkerSettings

pytestmark = [needs_chart_tools, pytest.mark.slow]

POD = {"POD_IP": "127.0.0.1", "POD_NAME": "duplane-worker-main-5c9d-x7k2p"}
PAGE = ROOT / "docs/kubernetes.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORTS: Sequence[str] = (
    *("scheduler", "worker", "edge", "operators"),
    *("health of scheduler", "health of worker", "health of edge"),
)
KEY = re.compile(r"dpk_\S+")
Settings = EdgeSettings | SchedulerSettings | WorkerSettings


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], Settings]:
    """Parse the command line of a role without serving; return the settings."""
    served: list[Settings] = []
    for module in ("edge.server", "scheduler.service", "worker.service"):
        monkeypatch.setattr(f"duplane.{module}.serve", lambda settings, _: served.append(settings))
    monkeypatch.setattr("duplane.worker.sandbox.forbid_inspection", lambda: None)
    monkeypatch.setattr(process, "run", lambda main: main(None) or 0)
    monkeypatch.setattr(servers, "configure_logging", lambda *_: None)

    def parse(command: Sequence[str]) -> Settings:
        code, output = run_command(*command)
        assert code == 0, output
        return served.pop()

    return parse


@pytest.mark.parametrize("name", EXAMPLES)
def test_commands_accept_all_arguments(
    name: str, parse: Callable[[Sequence[str]], Settings], tmp_path: Path
) -> None:
    rendered = rendered_examples()[name]
    for pod_name, pod in rendered.pods():
        folder = tmp_path / pod_name
        volumes_of(rendered, pod, folder, {})
        arguments = expanded(pod, folder, POD)
        create_missing(arguments, folder)
        program, role = pod["containers"][0]["command"]
        assert program == "duplane"
        settings = parse([role, *arguments])
        assert settings.fabric.fabric_tls == folder / "etc/duplane/certificate"
        if isinstance(settings, EdgeSettings):
            assert settings.limits.drain_s == 600
        if isinstance(settings, WorkerSettings):
            assert settings.worker_id.endswith(POD["POD_NAME"])
            assert settings.advertise == "127.0.0.1:8020"


def test_processes_find_each_other(
    parse: Callable[[Sequence[str]], Settings], tmp_path: Path
) -> None:
    """Names and ports of the Services are those that the processes use."""
    rendered = rendered_examples()["three-pools"]
    parsed: dict[str, Settings] = {}
    for pod_name, pod in rendered.pods():
        folder = tmp_path / pod_name
        volumes_of(rendered, pod, folder, {})
        arguments = expanded(pod, folder, POD)
        create_missing(arguments, folder)
        parsed[pod_name] = parse([pod["containers"][0]["command"][1], *arguments])
    service = rendered.of_kind("Service")["duplane-scheduler"]
    (port,) = (one["port"] for one in service["spec"]["ports"])
    address = f"duplane-scheduler.{NAMESPACE}.svc.cluster.local:{port}"
    schedulers = {
        settings.schedulers
        for settings in parsed.values()
        if not isinstance(settings, SchedulerSettings)
    }
    assert schedulers == {(address,)}
    pools = {one.pool for one in parsed.values() if isinstance(one, WorkerSettings)}
    assert {one.pool for one in parsed.values() if isinstance(one, EdgeSettings)} <= pools
    edge = parsed["duplane-edge-standard"]
    assert isinstance(edge, EdgeSettings)
    assert f"duplane-edge-standard.{NAMESPACE}.svc" in edge.allowed_hosts


def typed(commands: Sequence[str]) -> Secrets:
    """Run commands of the page in the current folder; return the secrets that they create."""
    secrets: dict[str, dict[str, bytes]] = {}
    for command in commands:
        match shlex.split(command):
            case ["duplane", *arguments, ">", file]:
                Path(file).write_text(KEY.findall(done(arguments))[0])
            case ["duplane", *arguments]:
                done(arguments)
            case ["kubectl", "--namespace", namespace, "create", "secret", "generic", name, source]:
                assert namespace == NAMESPACE
                path = Path(source.removeprefix("--from-file="))
                files = sorted(path.iterdir()) if path.is_dir() else [path]
                secrets[name] = {file.name: file.read_bytes() for file in files}
            case ["openssl", *arguments]:
                subprocess.run(["openssl", *arguments], check=True, capture_output=True)
            case words:
                pytest.fail(f"unknown command of the page: {words}")
    return secrets


def done(arguments: Sequence[str]) -> str:
    code, output = run_command(*arguments)
    assert code == 0, output
    return output


def commands_of(heading: str) -> Sequence[str]:
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line for block in BLOCK.findall(section) for line in block.strip().splitlines()]


def test_page_installs_examples_of_the_chart() -> None:
    (command,) = (one for one in commands_of("First try") if one.startswith("helm install "))
    words = shlex.split(command)
    assert words[2] == "duplane"
    assert (ROOT / words[3] / "Chart.yaml").exists()
    assert (ROOT / words[words.index("--values") + 1]) in EXAMPLES.values()
    forwarded = next(one for one in commands_of("First try") if "port-forward" in one).split()
    service = rendered_examples()["first-try"].of_kind("Service")[
        forwarded[-2].removeprefix("service/")
    ]
    assert forwarded[-1].partition(":")[2] == str(service["spec"]["ports"][0]["port"])


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not in PATH")
async def test_fabric_of_the_chart_serves_with_the_secrets_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods of an example run as processes, with the secrets of the page's commands."""
    monkeypatch.chdir(tmp_path)
    secrets = typed([*commands_of("Keys"), *commands_of("Certificates")])
    values = yaml.safe_load(EXAMPLES["certificate-secrets"].read_text())
    # No etcd, and no model to load. The page makes no certificate for clients.
    values["scheduler"] = {"store": "memory"}
    values["poolDefaults"] = {"checkpoint": "scripted"}
    values["edges"][0]["tlsSecret"] = ""
    rendered = render({"page": values})["page"]
    assert not rendered.error
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    async with contextlib.AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(
                pod_process(rendered, pod, tmp_path / name, secrets, ports)
            )
            for name, pod in rendered.pods()
        ]
        async with aiohttp.ClientSession() as http:
            await until(lambda: is_served(http, ports["operators"], tmp_path), WITHIN_S)
            for role in ("scheduler", "worker", "edge"):
                for path in ("livez", "readyz", "startupz"):
                    url = f"http://127.0.0.1:{ports[f'health of {role}']}/{path}"
                    async with http.get(url) as answer:
                        assert answer.status == 200, url
        for one in running:
            one.terminate()
        async with asyncio.timeout(WITHIN_S):
            assert [await one.wait() for one in running] == [0, 0, 0]


@contextlib.asynccontextmanager
async def pod_process(
    rendered: Rendered,
    pod: Any,
    folder: Path,
    secrets: Secrets,
    ports: Mapping[str, int],
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a pod as a process of this machine, on ports of its own."""
    volumes_of(rendered, pod, folder, secrets)
    role = pod["containers"][0]["name"]
    replaced = {
        f"duplane-scheduler.{NAMESPACE}.svc.cluster.local:8010": f"127.0.0.1:{ports['scheduler']}",
        "0.0.0.0:8010": f"127.0.0.1:{ports['scheduler']}",
        "0.0.0.0:8020": f"127.0.0.1:{ports['worker']}",
        "127.0.0.1:8020": f"127.0.0.1:{ports['worker']}",
        "0.0.0.0:8006": f"127.0.0.1:{ports['edge']}",
        "127.0.0.1:8007": f"127.0.0.1:{ports['operators']}",
        "0.0.0.0:8080": f"127.0.0.1:{ports[f'health of {role}']}",
        "0.0.0.0:9100": "127.0.0.1:0",
    }
    arguments = list(expanded(pod, folder, POD))
    for index, argument in enumerate(arguments):
        flag, separator, value = argument.partition("=")
        arguments[index] = f"{flag}{separator}{replaced.get(value, value)}"
    with (folder / "log").open("wb") as log:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "duplane.tools", role, *arguments),
            env={**os.environ, "HOME": str(folder / "tmp")},
            stdout=log,
            stderr=log,
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def is_served(http: aiohttp.ClientSession, port: int, folder: Path) -> bool:
    """True if operators of the edge see the worker of the chart."""
    key = (folder / "eve.key").read_text().strip()
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with http.get(f"http://127.0.0.1:{port}/workers", headers=headers) as answer:
            text = await answer.text()
    except aiohttp.ClientError:
        return False
    assert answer.status in (200, 503), text
    return f"fabric-{POD['POD_NAME']}" in text
