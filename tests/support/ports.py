"""Ports for servers of tests."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence


def free_ports(count: int) -> Sequence[int]:
    """Return ports of the loopback address that a server gets again after a restart.

    The system gives the ports above 32,767 to outgoing connections, also of other tests.
    """
    ports: list[int] = []
    for port in random.sample(range(10_240, 32_768), 1_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"fewer than {count} ports are free")
