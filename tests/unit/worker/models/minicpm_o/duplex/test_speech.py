"""The order in which the speech of several units is completed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from duplane.worker.models.minicpm_o.duplex.speech import SpeechStage
from duplane.worker.models.minicpm_o.stopwatch import Stopwatch


class LoggedStage(SpeechStage):
    """Logs the calls of the vocoder instead of running it."""

    def __init__(self, log: list[tuple[str, int]], most_rows: int) -> None:
        cache: Any = SimpleNamespace(length=lambda slot: 0)
        talker: Any = SimpleNamespace(cache=cache)
        vocoder: Any = SimpleNamespace(most_rows=most_rows)
        super().__init__(talker, vocoder)
        self._log = log

    def _draw_tokens(self, units: Sequence[Any], watch: Stopwatch) -> None:
        for unit in units:
            unit.chunks = deque(range(unit.chunk_count))

    def _encode_chunks(self, units: Sequence[Any]) -> None:
        pass

    def _decode_chunks(self, units: Sequence[Any]) -> None:
        for unit in units:
            unit.chunks.popleft()
            self._log.append(("decode", unit.slot))

    def end_turns(self, units: Sequence[Any]) -> None:
        self._log += [("end of turn", unit.slot) for unit in units]


def run(most_rows: int) -> list[tuple[str, int]]:
    """Run four units, of which the first has two chunks; return the log."""
    log: list[tuple[str, int]] = []
    conversation = SimpleNamespace(awaits_voice=False)
    units: list[Any] = [
        SimpleNamespace(
            slot=slot,
            failure=None,
            chunk_count=count,
            state=SimpleNamespace(end_of_turn=is_end),
            conversation=conversation,
        )
        for slot, (count, is_end) in enumerate([(2, True), (1, False), (1, True), (1, False)])
    ]
    for unit in LoggedStage(log, most_rows).run(units, Stopwatch(torch.device("cpu"))):
        log.append(("yield", unit.slot))
    return log


def test_no_unit_waits_for_the_end_of_a_turn_or_a_further_chunk_of_another() -> None:
    assert run(most_rows=4) == [
        *(("decode", slot) for slot in range(4)),
        ("yield", 1),
        ("yield", 2),
        ("yield", 3),
        ("decode", 0),
        ("yield", 0),
        ("end of turn", 0),
        ("end of turn", 2),
    ]


def test_units_whose_chunks_do_not_fit_into_one_call_come_before_further_chunks() -> None:
    assert run(most_rows=2) == [
        ("decode", 0),
        ("decode", 1),
        ("yield", 1),
        ("decode", 2),
        ("decode", 3),
        ("yield", 2),
        ("yield", 3),
        ("decode", 0),
        ("yield", 0),
        ("end of turn", 0),
        ("end of turn", 2),
    ]
