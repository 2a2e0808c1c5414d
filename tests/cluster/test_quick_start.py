"""Runs the commands of docs/cluster.md unchanged, on hosts with the addresses of that page."""

from __future__ import annotations

import asyncio
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
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.full_etcd import QUOTA_BYTES, QUOTA_FLAGS, fill
from support.time_limits import until

from duplane.scheduler.etcd.client import EtcdClient

pytestmark = pytest.mark.timing

BLOCK = re.compile(r"^```sh\n# on (.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

PREPARATION = re.compile(r"^```sh\n# once\n(.*?)^```$", re.DOTALL | re.MULTILINE)


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
    page = (ROOT / "docs/cluster.md").read_text()
    (preparation,) = PREPARATION.findall(page)
    await asyncio.to_thread(subprocess.run, runnable(preparation, tmp_path), check=True)
    *servers, (_, talk) = BLOCK.findall(page)
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


@pytest.mark.slow
async def test_the_commands_of_the_page_make_room_on_every_member(tmp_path: Path) -> None:
    etcdctl = Path(debian_program("etcdctl", "etcd-client"))
    commands = re.findall(
        r"^### Make room in etcd\n.*?^```sh\n(.*?)^```$",
        (ROOT / "docs/cluster.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )[0]
    async with EtcdCluster.running(tmp_path, 3, flags=QUOTA_FLAGS) as etcd:
        clients = [EtcdClient([address]) for address in etcd.addresses]
        await fill(clients[0])
        assert await clients[0].alarms()
        for ip, address in zip(("1", "2", "3"), etcd.addresses, strict=True):
            commands = commands.replace(f"10.77.0.{ip}:2379", address)
        path = f"{etcdctl.parent}:{os.environ['PATH']}"
        await asyncio.to_thread(
            subprocess.run, ["sh", "-ec", commands], check=True, env={"PATH": path}
        )
        for client in clients:
            await client.put(b"/key", b"value")
            assert not await client.alarms()
            await client.close()
        for member in etcd.members:
            assert member.database_bytes() < QUOTA_BYTES / 2


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
