"""Operations that are postponed because the contact to etcd is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from duplane.scheduler.store.base import RETURN_S
from duplane.scheduler.store.etcd.contact import Contact


class Postponed:
    """Cancellations of tickets and ends of registrations, postponed while the contact is lost.

    When the contact is lost, the scheduler ends all calls. The callers and workers return to this
    or to another scheduler as soon as they can. The operations begin `RETURN_S` after the contact
    is back. They apply only to calls that have ended, so callers and workers that have returned
    keep their tickets and registrations.
    """

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        # The keys are names, so that each ticket and registration has at most one operation.
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
