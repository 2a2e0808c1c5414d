"""Runs many cases and counts messages, replies and faults."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fuzz.cases import make_case
from fuzz.faults import Fault, explain, try_case

_ENOUGH_FAULTS = 5


@dataclass(slots=True)
class Tally:
    """Counts of the cases, messages, answers and faults of one dialect."""

    case_count: int = 0
    message_count: int = 0
    mutated_count: int = 0
    busy_s: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.case_count += other.case_count
        self.message_count += other.message_count
        self.mutated_count += other.mutated_count
        self.busy_s += other.busy_s
        self.answers += other.answers
        self.faults += other.faults


def run_cases(
    seed: str, dialect: str, *, mutated_count: float = float("inf"), for_s: float = float("inf")
) -> Tally:
    """Run cases through the pure session.

    Stop at a number of messages or faults, or after a time.
    """
    tally = Tally()
    began = time.monotonic()
    for name in _names(seed, dialect):
        is_enough = tally.mutated_count >= mutated_count or tally.busy_s >= for_s
        if is_enough or len(tally.faults) >= _ENOUGH_FAULTS:
            return tally
        case = make_case(name, dialect)
        run, what = try_case(case)
        if what:
            tally.faults.append(explain(case, what))
        tally.case_count += 1
        tally.message_count += run.message_count
        tally.mutated_count += run.mutated_count
        tally.answers += run.answers
        tally.busy_s = time.monotonic() - began
    return tally


def _names(seed: str, dialect: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{seed}/{dialect}/{number}"
        number += 1
