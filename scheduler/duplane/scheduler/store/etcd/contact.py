"""The contact of this scheduler to etcd: whether its session is alive and its facts are current."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from duplane.fabric.errors import FabricError, Reason

Answer = TypeVar("Answer")
_log = logging.getLogger(__name__)


class Contact:
    """The contact to etcd.

    The contact is lost if etcd has not confirmed this scheduler's presence lately. By then the
    other schedulers have ended the session of this scheduler. The contact is also lost if the watch
    has not been up to date lately: then the scheduler does not see the grants of its callers. In
    both cases, the callers should not wait any longer. Times are those of the event loop.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self.listeners: list[Callable[[bool], None]] = []  # called with `is_lost`
        self._presence_at = 0.0
        self._watch_at = 0.0
        self._is_confirmed = asyncio.Event()
        # This dict is used as a set that keeps its order.
        self._waiting: dict[asyncio.Future[Any], None] = {}

    def confirm_presence(self, at: float) -> None:
        """Record that etcd has confirmed the presence, by the answer to a request sent at `at`."""
        self._presence_at = max(self._presence_at, at)
        self._is_confirmed.set()

    def confirm_watch(self, at: float) -> None:
        """Record that the watch has delivered everything that etcd had at `at`."""
        self._watch_at = max(self._watch_at, at)
        self._is_confirmed.set()

    @property
    def _confirmed_at(self) -> float:
        return min(self._presence_at, self._watch_at)

    async def run(self, limit_s: float, until_current: Callable[[], Awaitable[None]]) -> NoReturn:
        """Call the listeners when the contact is lost and when it is back, until cancelled.

        The contact is lost `limit_s` after the latest confirmation of the presence or of the watch.
        It is back when both are confirmed again and `until_current` has returned.
        """
        loop = asyncio.get_running_loop()
        self.confirm_presence(loop.time())
        self.confirm_watch(loop.time())
        while True:
            self._is_confirmed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._confirmed_at + limit_s):
                    await self._is_confirmed.wait()
            if loop.time() < self._confirmed_at + limit_s:
                continue
            lost = "presence" if self._presence_at <= self._watch_at else "watch"
            _log.error(
                "etcd: the %s is not confirmed for %.0f s; refusing all calls", lost, limit_s
            )
            self._set_lost(True)
            while loop.time() >= self._confirmed_at + limit_s:
                self._is_confirmed.clear()
                await self._is_confirmed.wait()
            await until_current()
            self._set_lost(False)
            _log.info("etcd answers again; accepting calls")

    def require(self) -> None:
        """Raise FabricError UNAVAILABLE while the contact is lost."""
        if self.is_lost:
            raise _unavailable()

    async def wait(self, future: asyncio.Future[Answer]) -> Answer:
        """Wait for an operation. Raises FabricError UNAVAILABLE while the contact is lost.

        If the wait ends early, the operation continues.
        """
        self.require()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def pass_on(ended: asyncio.Future[Answer]) -> None:
            if answer.done():
                return
            if ended.cancelled():
                answer.cancel()
            elif error := ended.exception():
                answer.set_exception(error)
            else:
                answer.set_result(ended.result())

        future.add_done_callback(pass_on)
        self._waiting[answer] = None
        try:
            return await answer
        finally:
            del self._waiting[answer]
            future.remove_done_callback(pass_on)

    def _set_lost(self, is_lost: bool) -> None:
        self.is_lost = is_lost
        for listener in self.listeners:
            listener(is_lost)
        for answer in self._waiting if is_lost else ():
            if not answer.done():
                answer.set_exception(_unavailable())


def _unavailable() -> FabricError:
    return FabricError(Reason.UNAVAILABLE, "the scheduler has no contact to its store")
