"""Operations that are postponed because the contact to etcd is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from duplane.scheduler.store.base import RETURN_S
from duplane.scheduler.store.etcd.contact import Contact


class Postponed:
    """Cancellations of tickets and ends of registrations, which begin when callers have returned.

    They begin `RETURN_S` after the contact is back.
    When the contact is lost, the scheduler ends all calls. The callers and workers return to it or
    to another scheduler as soon as they can. Those that have returned by then keep their tickets
    and registrations, because the postponed operations apply only to the calls that have ended.
    """

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        # By name, so that there is at most one operation for each ticket and registration.
        self._operations: dict[object, Callable[[], object]] = {}
        self._timer: asyncio.TimerHandle | None = None
        contact.listeners.append(self._on_contact)

    def require_contact(self, name: object, begin: Callable[[], object]) -> None:
        """While the contact is lost, postpone an operation and raise FabricError UNAVAILABLE."""
        if self._contact.is_lost:
            self._operations[name] = begin
        self._contact.require()

    def close(self) -> None:
        """Begin no postponed operation from now on."""
        if self._timer:
            self._timer.cancel()

    def _on_contact(self, is_lost: bool) -> None:
        self.close()
        if not is_lost:
            self._timer = asyncio.get_running_loop().call_later(RETURN_S, self._begin_all)

    def _begin_all(self) -> None:
        operations, self._operations = self._operations, {}
        for begin in operations.values():
            begin()
