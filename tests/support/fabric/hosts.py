"""Hosts on one machine: network namespaces on one bridge, with processes and partitions.

A namespace has no name and no file, so it exists as long as its first process. When the test
process ends, even if it is killed, the kernel kills this first process and every other process of
the host. So nothing is left behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

NETWORK = "10.77.0"
_NAMES = Path("/etc/hosts")
_CLONE_NEWNET = 0x40000000
_NOWHERE = "02:00:00:00:00:00"  # no interface has this Ethernet address
_PROGRAMS = ("ip", "nsenter", "setpriv", "unshare")
_DIES_WITH_TEST = ("setpriv", "--pdeathsig", "KILL")


def why_no_hosts() -> str:
    """Return why this machine cannot have hosts; an empty text if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a feature of Linux"
    if missing := [program for program in _PROGRAMS if not shutil.which(program)]:
        return f"{', '.join(missing)} not in PATH"
    made = subprocess.run(
        ("unshare", "--net", "ip", "link", "add", "type", "veth"),
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


class Network:
    """A bridge, in a namespace of its own. Hosts are numbered from 1.

    All hosts resolve names by the file `names`, which has the format of /etc/hosts.
    """

    def __init__(self, names: Path = _NAMES) -> None:
        self._names = names
        self._switch = _namespace(names)
        self.hosts: list[Host] = []
        _run(self._switch, "ip link add bridge type bridge && ip link set bridge up")

    def add_host(self) -> Host:
        host = Host(len(self.hosts) + 1, self._switch, self._names)
        self.hosts.append(host)
        return host

    def close(self) -> None:
        """Kill every process of every host."""
        for host in self.hosts:
            host.close()
        _end(self._switch)

    @staticmethod
    def cut(one: Host, other: Host) -> None:
        """Drop every packet between two hosts. Neither host gets an error."""
        for host, peer in ((one, other), (other, one)):
            host.run(f"ip neigh replace {peer.ip} lladdr {_NOWHERE} dev eth0 nud permanent")

    @staticmethod
    def mend(one: Host, other: Host) -> None:
        for host, peer in ((one, other), (other, one)):
            host.run(f"ip neigh del {peer.ip} dev eth0")


class Host:
    """One network namespace with one address, and the processes in it."""

    def __init__(self, number: int, switch: subprocess.Popen[bytes], names: Path) -> None:
        self.ip = f"{NETWORK}.{number}"
        self._namespace = _namespace(names)
        self._processes: list[subprocess.Popen[bytes]] = []
        _run(
            switch,
            f"ip link add port{number} type veth peer name eth0 netns {self._namespace.pid}"
            f" && ip link set port{number} master bridge up",
        )
        self.run(f"ip addr add {self.ip}/24 dev eth0 && ip link set eth0 up && ip link set lo up")

    def run(self, commands: str) -> None:
        """Run shell commands in this host."""
        _run(self._namespace, commands)

    def start(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a process in this host; its output goes to `log`."""
        process = subprocess.Popen(
            (*_DIES_WITH_TEST, *_enter(self._namespace), *command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        self._processes.append(process)
        return process

    async def connect(self, ip: str, port: int, within_s: float = 5.0) -> socket.socket:
        """Connect a socket of this host. It can be used in any thread."""
        return await asyncio.to_thread(self._connect, ip, port, within_s)

    def _connect(self, ip: str, port: int, within_s: float) -> socket.socket:
        """Connect in the host's network namespace, which this thread enters and leaves again."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            Path("/proc/thread-self/ns/net").open() as own,
            Path(f"/proc/{self._namespace.pid}/ns/net").open() as host,
        ):
            _check(libc.setns(host.fileno(), _CLONE_NEWNET))
            try:
                return socket.create_connection((ip, port), timeout=within_s)
            finally:
                _check(libc.setns(own.fileno(), _CLONE_NEWNET))

    def close(self) -> None:
        for process in self._processes:
            _end(process)
        _end(self._namespace)


def _namespace(names: Path) -> subprocess.Popen[bytes]:
    """Start the process that owns a host's namespaces, and wait until they exist."""
    script = f'mount --bind "$1" {_NAMES} && echo && exec sleep infinity'
    holder = subprocess.Popen(
        (*_DIES_WITH_TEST, "unshare", "--net", "--mount", "sh", "-c", script, "sh", str(names)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout
    with holder.stdout as ready:
        assert ready.readline(), "no namespace"
    return holder


def _enter(namespace: subprocess.Popen[bytes]) -> Sequence[str]:
    return ("nsenter", "--target", str(namespace.pid), "--net", "--mount")


def _run(namespace: subprocess.Popen[bytes], commands: str) -> None:
    done = subprocess.run(
        (*_enter(namespace), "sh", "-c", commands), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{commands}: {done.stderr}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
