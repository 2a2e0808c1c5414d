"""Checks whether etcd accepts writes. It refuses them while its database exceeds its quota."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.repeated_log import RepeatedLog
from duplane.scheduler.etcd.client import EtcdClient, EtcdError, FullError, NoAnswerError

INTERVAL_S = 5.0  # between two looks at etcd's alarms, because an idle scheduler writes nothing
RETRY_S = 1.0  # between two writes while etcd refuses them

_log = logging.getLogger(__name__)


class WriteCheck:
    """Why etcd accepts no writes.

    While etcd refuses writes, it still answers reads, delivers events and renews leases, so the
    contact is not lost. Nothing in etcd changes in this time, so all operations wait.
    """

    def __init__(self, client: EtcdClient, key: bytes) -> None:
        """Write `key` to find out whether etcd accepts writes."""
        self.refusal = ""  # why etcd accepts no writes; empty while it accepts them
        self.listeners: list[Callable[[str], None]] = []  # called with `refusal`
        self._client = client
        self._key = key
        self._repeated = RepeatedLog(_log)

    def require(self) -> None:
        """Raise FabricError UNAVAILABLE while etcd accepts no writes."""
        if self.refusal:
            raise FabricError(Reason.UNAVAILABLE, self.refusal)

    async def run(self) -> NoReturn:
        """Check after a refused request, and at an interval whether etcd has alarms."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._client.has_refused.wait()
            if not self._client.has_refused.is_set() and not await self._alarms():
                continue
            while refusal := await self._refusal():
                self._set(refusal)
                self._repeated.report(f"{refusal}; no slot is granted and no worker registers")
                await asyncio.sleep(RETRY_S)
            self._repeated.resolve("etcd accepts writes again")
            self._set("")
            self._client.has_refused.clear()

    async def _alarms(self) -> Sequence[str]:
        """Return etcd's alarms; none if they cannot be read."""
        try:
            return await self._client.alarms()
        except (EtcdError, NoAnswerError):
            return ()

    async def _refusal(self) -> str:
        """Write once, and return why etcd refuses it. If etcd does not answer, nothing changes."""
        try:
            await self._client.put(self._key, b"")
        except FullError as error:
            return f"etcd accepts no writes: its database exceeds its quota ({error})"
        except NoAnswerError:
            return self.refusal
        except EtcdError as error:
            return f"etcd accepts no writes: {error.message}"
        return ""

    def _set(self, refusal: str) -> None:
        if bool(refusal) != bool(self.refusal):
            self.refusal = refusal
            for listener in self.listeners:
                listener(refusal)
