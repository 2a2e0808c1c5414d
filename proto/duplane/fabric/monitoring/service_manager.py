"""Tells the service manager that a process has started, lives and ends (systemd's `sd_notify`).

A message is one datagram to a local socket. The packages for this protocol need the library of
systemd or are no longer kept, so this module writes the datagrams itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

_log = logging.getLogger(__name__)
SOCKET, WATCHDOG, WATCHDOG_PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
VARIABLES = (SOCKET, WATCHDOG, WATCHDOG_PROCESS)
"""Environment variables of the protocol. They are for one process, not for those that it starts."""


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Where messages go, and the watchdog's time limit in seconds; None without a watchdog.

    A service that sends no sign of life within this time is killed and started again.
    """

    address: str
    watchdog_s: float | None

    def tell(self, message: str) -> None:
        """Send a message. It is lost if it cannot be sent at once: the event loop must not wait."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self.address)
        except OSError as error:
            _log.warning("cannot tell the service manager %s: %s", message, error)


def service_manager(environment: Mapping[str, str] = os.environ) -> ServiceManager | None:
    """Return the service manager that the environment names; None if it names none."""
    address = environment.get(SOCKET, "")
    if not address:
        return None
    if address[0] not in "/@":
        _log.warning("%s is %r, must be a path or begin with @", SOCKET, address)
        return None
    if address[0] == "@":
        address = f"\0{address[1:]}"  # an abstract socket
    limit_us = environment.get(WATCHDOG, "")
    is_mine = environment.get(WATCHDOG_PROCESS, str(os.getpid())) == str(os.getpid())
    has_watchdog = is_mine and limit_us.isdecimal() and int(limit_us) > 0
    return ServiceManager(address, int(limit_us) / 1e6 if has_watchdog else None)


@contextlib.asynccontextmanager
async def told(
    manager: ServiceManager,
    started: Callable[[], Awaitable[object]],
    draining: Callable[[], Awaitable[object]],
    is_live: Callable[[], bool],
) -> AsyncGenerator[None]:
    """Tell `manager` during the body of the `with` when the process has started and when it drains.

    While the event loop runs and `is_live()`, the watchdog gets signs of life.
    """
    tasks = [asyncio.create_task(_tell_states(manager, started, draining))]
    if manager.watchdog_s is not None:
        tasks.append(asyncio.create_task(_show_life(manager, manager.watchdog_s, is_live)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _tell_states(
    manager: ServiceManager,
    started: Callable[[], Awaitable[object]],
    draining: Callable[[], Awaitable[object]],
) -> None:
    await started()
    manager.tell("READY=1")
    await draining()
    manager.tell("STOPPING=1")


async def _show_life(
    manager: ServiceManager, limit_s: float, is_live: Callable[[], bool]
) -> NoReturn:
    while True:
        if is_live():
            manager.tell("WATCHDOG=1")
        await asyncio.sleep(limit_s / 3)  # two signs may be late or lost
