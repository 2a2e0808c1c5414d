"""Decides whether this scheduler accepts calls."""

from __future__ import annotations

import asyncio
from typing import Protocol

from duplane.scheduler.store.base import LeaseStore


class Refusing(Protocol):
    """A part of the scheduler that can refuse calls."""

    def refuse(self, why: str) -> None:
        """Refuse calls for the reason `why`, or accept calls again if `why` is empty.

        Calls that are under way when the refusal begins end with UNAVAILABLE.
        """
        ...


class Availability:
    """Makes `parts` refuse calls while the contact to the store is lost, and after `stop`.

    Callers and workers whose calls are refused use another scheduler. `changed` is set at every
    change of `is_serving`.
    """

    def __init__(self, store: LeaseStore, *parts: Refusing) -> None:
        self.is_serving = True
        self.changed = asyncio.Event()
        self._parts = parts
        self._is_stopping = False
        self._refusal = ""  # why the store refuses changes
        store.watch_refusal(self._on_refusal)
        store.watch_contact(self._on_contact)

    def stop(self) -> None:
        """Refuse calls for ever."""
        self._is_stopping = True
        self._refuse("the scheduler is stopping")

    def _on_contact(self, is_lost: bool) -> None:
        if not self._is_stopping:
            why = self._refusal or "the scheduler has no contact to its store"
            self._refuse(why if is_lost else "")

    def _on_refusal(self, refusal: str) -> None:
        self._refusal = refusal

    def _refuse(self, why: str) -> None:
        self.is_serving = not why
        for part in self._parts:
            part.refuse(why)
        self.changed.set()
