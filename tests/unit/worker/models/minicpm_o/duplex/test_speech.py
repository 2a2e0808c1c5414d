"""The order in which the speech of several units is completed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from duplane.worker.models.interface import Continue, Part, Result, Unfinished
from duplane.worker.models.minicpm_o.duplex.conversation import RunningUnit
from duplane.worker.models.minicpm_o.launches import Launches
from duplane.worker.models.minicpm_o.stopwatch import Stopwatch

LLM: Any = SimpleNamespace(
    model=SimpleNamespace(norm=SimpleNamespace(weight=torch.zeros(1))),
)


class LoggedSpeech:
    """Logs the chunks instead of decoding them."""

    def __init__(self, log: list[tuple[str, int]], most_rows: int) -> None:
        self._log, self.most_rows = log, most_rows

    def decode(self, units: Sequence[Any], watch: Stopwatch) -> None:
        for unit in units:
            unit.chunks.popleft()
            self._log.append(("decode", unit.slot))


class LoggedUnits:
    """Logs the units that are complete after a launch."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        self._log = log

    def results(self, units: Sequence[RunningUnit]) -> Iterator[Result]:
        for unit in units:
            if unit.part is None:
                self._log.append(("complete", unit.slot))
            else:
                yield Unfinished(unit.slot, unit.part, unit.left)


def run(most_rows: int) -> list[tuple[str, int]]:
    """Speak four units, of which the first has two chunks; return the log."""
    log: list[tuple[str, int]] = []
    pipeline: Any = LoggedUnits(log)
    speech: Any = LoggedSpeech(log, most_rows)
    chats: Any = SimpleNamespace()
    launches = Launches(LLM, pipeline, chats, speech, None)
    state: Any = SimpleNamespace(is_listen=False)
    for slot, count in enumerate([2, 1, 1, 1]):
        conversation: Any = SimpleNamespace(
            status=None, part=Part.VOCODE, opening=None, speech=speech
        )
        given: Any = None
        conversation.running = RunningUnit(slot, given, conversation, state, is_interrupting=False)
        conversation.running.is_spoken = True
        chunks: deque[Any] = deque(range(count))
        conversation.running.chunks = chunks
        launches.conversations[slot] = conversation
    waiting: list[Result] = [Unfinished(slot, Part.VOCODE) for slot in range(4)]
    while waiting:
        items = [Continue(result.slot, Part.VOCODE, 1) for result in waiting]
        waiting = list(launches.run(items))
    return log


def test_no_unit_waits_for_a_further_chunk_of_another() -> None:
    assert run(most_rows=4) == [
        *(("decode", slot) for slot in range(4)),
        ("complete", 1),
        ("complete", 2),
        ("complete", 3),
        ("decode", 0),
        ("complete", 0),
    ]


def test_units_whose_chunks_do_not_fit_into_one_call_come_before_further_chunks() -> None:
    assert run(most_rows=2) == [
        ("decode", 0),
        ("decode", 1),
        ("complete", 1),
        ("decode", 2),
        ("decode", 3),
        ("complete", 2),
        ("complete", 3),
        ("decode", 0),
        ("complete", 0),
    ]
