"""Stops of workers under load: one worker at a time."""

from __future__ import annotations

import signal
import time

import pytest

from duplane.tools.bench.load import stops
from duplane.tools.bench.load.stops import Stopper
from duplane.tools.up.supervisor import Role

DRAINING_LOOKS = 2


class DrainingRole(Role):
    """A worker that stays ready for `DRAINING_LOOKS` due stops after a signal, then is replaced."""

    def __init__(self, name: str, process_id: int, order: list[str]) -> None:
        super().__init__(name, (), "127.0.0.1:1")
        self._order = order
        self._id = process_id
        self._looks_left = 0

    @property
    def process_id(self) -> int:
        return self._id

    @property
    def is_ready(self) -> bool:
        if self._looks_left:
            self._looks_left -= 1
            self._id += not self._looks_left
        return True

    def send_signal(self, number: signal.Signals) -> None:
        assert number is signal.SIGTERM
        self._order.append(self.name)
        self._looks_left = 1 + DRAINING_LOOKS


async def test_no_worker_is_stopped_while_the_last_one_still_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def session_count(*_: object) -> int:
        return 3

    monkeypatch.setattr(stops, "_session_count", session_count)
    order: list[str] = []
    workers = [DrainingRole("first", 100, order), DrainingRole("second", 200, order)]
    stopper = Stopper(workers, "127.0.0.1:1", 1.0, signal.SIGTERM)
    await stopper.run(time.monotonic() - 100, 8.0)  # seven stops are due at once
    assert order == ["first", "second", "first"]
    assert [one.session_count for one in stopper.stops] == [3, 3, 3]
