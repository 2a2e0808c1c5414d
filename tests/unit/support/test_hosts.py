"""Hosts in network namespaces: their addresses, partitions and ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.fabric.hosts import Host, Network, why_no_hosts
from support.paths import TESTS
from support.time_limits import WITHIN_S

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 7))
while True:
    connection, _ = server.accept()
    connection.sendall(connection.recv(100))
"""


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


async def echo(client: Host, server: Host) -> bytes:
    """Connect, send a message and return the answer; retry until the server listens."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                connection = await client.connect(server.ip, 7, WITHIN_S)
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)
                continue
            with connection:
                connection.sendall(b"hello")
                return await asyncio.to_thread(connection.recv, 100)


def serve(host: Host) -> subprocess.Popen[bytes]:
    with Path(os.devnull).open("wb") as log:
        return host.start((sys.executable, "-c", ECHO), log)


async def test_hosts_reach_each_other_and_a_cut_separates_only_two(network: Network) -> None:
    server, near, far = (network.add_host() for _ in range(3))
    serve(server)
    assert await echo(near, server) == b"hello"
    network.cut(far, server)
    with pytest.raises(TimeoutError):
        await far.connect(server.ip, 7, within_s=2.0)
    assert await echo(near, server) == b"hello"
    network.mend(far, server)
    assert await echo(far, server) == b"hello"


def test_nothing_is_left_of_a_test_process_that_is_killed() -> None:
    code = f"""
import signal, subprocess, sys, time
sys.path.insert(0, {str(TESTS)!r})
from support.fabric.hosts import Network
host = Network().add_host()
host.start(("sleep", "60"), subprocess.DEVNULL)
print("ready", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout
    with process.stdout as output:
        assert output.readline() == b"ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3
        process.kill()
        process.wait()
    gone, alive = psutil.wait_procs(children, timeout=WITHIN_S)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    del gone
