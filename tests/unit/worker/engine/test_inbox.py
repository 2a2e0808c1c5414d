"""The inbox is bounded, drops the oldest units, and keeps interruptions and order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.inbox import Entry, Inbox
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.types import (
    MAX_SPEECH_REQUESTS,
    SpeechOutcome,
    SpeechRequest,
    SpeechResult,
    Unit,
    too_many,
)

SILENCE = np.zeros(4, np.float32)


def unit(sequence: int, *, force_listen: bool = False) -> UnitRecord:
    return UnitRecord(Unit(0, SILENCE, force_listen, sequence=sequence))


def refusal(sequence: int) -> FailedUnit:
    return FailedUnit(sequence, "INVALID_FIELD", "bad")


def drain(inbox: Inbox) -> list[Entry]:
    return [inbox.entries.popleft() for _ in range(len(inbox.entries))]


def test_units_come_out_in_order() -> None:
    inbox = Inbox()
    assert [inbox.put(unit(sequence)) for sequence in range(4)] == [None] * 4
    assert [entry.sequence for entry in drain(inbox)] == [0, 1, 2, 3]


def test_the_oldest_unit_makes_room_for_the_newest() -> None:
    inbox = Inbox(capacity=2)
    dropped = [inbox.put(unit(sequence)) for sequence in range(5)]
    assert [entry and entry.sequence for entry in dropped] == [None, None, 0, 1, 2]
    assert inbox.put(refusal(5)) is None
    assert [entry.sequence for entry in drain(inbox)] == [3, 4, 5]


def test_an_interruption_passes_from_a_dropped_unit_to_the_next_and_no_further() -> None:
    inbox = Inbox(capacity=2)
    inbox.put(unit(0, force_listen=True))
    for sequence in (1, 2, 3):
        inbox.put(unit(sequence))
    listens = [entry.unit.force_listen for entry in drain(inbox) if isinstance(entry, UnitRecord)]
    assert listens == [True, False]


def test_an_interruption_waits_behind_an_answer_that_is_owed() -> None:
    inbox = Inbox(capacity=1)
    inbox.put(unit(0, force_listen=True))
    inbox.put(refusal(1))
    inbox.put(unit(2))
    answer, kept = drain(inbox)
    assert answer == refusal(1)
    assert isinstance(kept, UnitRecord)
    assert kept.unit.force_listen


def test_garbage_pushes_out_no_unit() -> None:
    inbox = Inbox()
    inbox.put(unit(0))
    for sequence in range(1, 1000):
        inbox.put(refusal(sequence))
    entries = drain(inbox)
    assert entries[0].sequence == 0
    assert len(entries) < 30
    assert entries[-1] == refusal(999)


@given(
    capacity=st.integers(1, 5),
    steps=st.lists(st.sampled_from(["listen", "unit", "bad", "take"]), max_size=60),
)
def test_every_entry_comes_out_once_in_order_or_is_dropped(capacity: int, steps: list[str]) -> None:
    inbox = Inbox(capacity)
    taken: list[Entry] = []
    put = dropped_count = 0
    for step in steps:
        if step == "take":
            if inbox.entries:
                taken.append(inbox.entries.popleft())
            continue
        entry = refusal(put) if step == "bad" else unit(put, force_listen=step == "listen")
        dropped_count += inbox.put(entry) is not None
        put += 1
        assert len(inbox.entries) <= capacity + 16
    taken += drain(inbox)
    sequences = [entry.sequence for entry in taken]
    assert sequences == sorted(set(sequences))
    assert len(taken) + dropped_count == put


def asking(sequence: int, *numbers: int, force_listen: bool = False) -> UnitRecord:
    speech = tuple(SpeechRequest(number, "text") for number in numbers)
    return UnitRecord(Unit(0, SILENCE, force_listen, sequence=sequence, speech=speech))


def only_unit(*records: UnitRecord) -> Unit:
    """Return the last of these units, after it has got what the dropped ones had."""
    inbox = Inbox(capacity=1)
    for record in records:
        inbox.put(record)
    (entry,) = drain(inbox)
    assert isinstance(entry, UnitRecord)
    return entry.unit


def test_requests_to_speak_pass_from_dropped_units_to_the_next() -> None:
    kept = only_unit(asking(0, 1), asking(1), asking(2, 2, 3))
    assert [request.number for request in kept.speech] == [1, 2, 3]
    assert kept.speech_results == ()


def test_an_interruption_ends_the_requests_of_units_before_it() -> None:
    kept = only_unit(asking(0, 1), asking(1, 2, force_listen=True), asking(2, 3))
    assert [request.number for request in kept.speech] == [2, 3]
    assert kept.speech_results == (SpeechResult(1, SpeechOutcome.INTERRUPTED),)
    assert kept.force_listen


def test_requests_of_many_dropped_units_are_bounded() -> None:
    count = 300
    kept = only_unit(*(asking(number, number) for number in range(count)))
    assert [request.number for request in kept.speech] == [*range(MAX_SPEECH_REQUESTS)]
    newest = [too_many(number) for number in range(count - 64, count)]
    assert [*kept.speech_results] == newest
