"""Runs the commands of docs/cluster.md unchanged, on hosts with the addresses of that page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.debian_programs import debian_program
from support.fabric.hosts import Host, Network, why_no_hosts
from support.paths import ROOT
from support.time_limits import until

pytestmark = pytest.mark.timing

BLOCK = re.compile(r"^```sh\n# on (.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def network() -> Iterator[Network]:
    if why := why_no_hosts():
        pytest.skip(why)
    debian_program("etcd", "etcd-server")  # skips the test if there is no etcd
    network = Network()
    yield network
    network.close()


def runnable(command: str, folder: Path) -> tuple[str, ...]:
    """Return arguments that run a command of the page.

    In this command, `folder` replaces `/tmp`.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    duplane = programs / "duplane"
    duplane.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m duplane.tools "$@"\n')
    duplane.chmod(0o755)
    etcd = Path(debian_program("etcd", "etcd-server")).parent
    path = f"PATH={programs}:{etcd}:{os.environ['PATH']}"
    return ("env", path, "sh", "-c", f"exec {command}".replace("/tmp/", f"{folder}/"))


async def test_the_commands_of_the_page_start_a_fabric(network: Network, tmp_path: Path) -> None:
    *servers, (_, talk) = BLOCK.findall((ROOT / "docs/cluster.md").read_text())
    hosts: dict[str, Host] = {}
    for ip, command in servers:
        if ip not in hosts:
            host = network.add_host()
            hosts[host.ip] = host
        with (tmp_path / "servers.log").open("ab") as log:
            hosts[ip].start(runnable(command, tmp_path), log)
    client = network.add_host()
    edge = urllib.parse.urlsplit(re.findall(r"ws://\S+", talk)[0])
    assert edge.hostname
    assert edge.port
    await until(lambda: is_listening(client, str(edge.hostname), edge.port or 0), 60)
    output = tmp_path / "talk.log"
    with output.open("wb") as log:
        talking = client.start(runnable(talk, tmp_path), log)
    code = await wait(talking)
    logs = f"{(tmp_path / 'servers.log').read_text()}\n{output.read_text()}"
    assert code == 0, logs


async def is_listening(client: Host, ip: str, port: int) -> bool:
    try:
        connection = await client.connect(ip, port)
    except OSError:
        return False
    connection.close()
    return True


async def wait(process: subprocess.Popen[bytes]) -> int:
    async def has_ended() -> bool:
        return process.poll() is not None

    await until(has_ended, 90)
    assert process.returncode is not None
    return process.returncode
