"""The ledger of a load generator: a unit has one outcome, timed by its last message."""

from __future__ import annotations

import pytest

from duplane.tools.bench.load.ledger import Answer, Counts, Ledger


class Book:
    """A ledger and its counts. The generator is blocked for `stalled_s` before each answer."""

    def __init__(self, stalled_s: float = 0.0) -> None:
        self.counts = Counts()
        self.ledger = Ledger(self.counts, lambda begin_s, end_s: stalled_s)

    def send(self, *numbers: int, is_measured: bool = True) -> Book:
        for number in numbers:
            self.ledger.sent(number, float(number), is_measured=is_measured)
        return self

    def found(self) -> dict[str, int]:
        self.ledger.end()
        counts = {name: getattr(self.counts, name) for name in Counts.__dataclass_fields__}
        return {name: count for name, count in counts.items() if count}


def named(unit: int, part: str = "audio", dropped_count: int = 0) -> Answer:
    return Answer(unit=unit, part=part, worker_ms=5.0, dropped_count=dropped_count)


def test_time_is_from_the_sending_to_the_last_message_about_the_unit() -> None:
    book = Book().send(0, 1)
    book.ledger.answered(named(0, "text"), 0.020)
    book.ledger.answered(named(0, "audio"), 0.030)
    book.ledger.answered(named(1, "text"), 1.040)
    assert book.found() == {"sent": 2, "answered": 2}
    assert [round(one.latency_ms, 3) for one in book.ledger.timed] == [30.0, 40.0]
    assert [round(one.added_ms, 3) for one in book.ledger.timed] == [25.0, 35.0]


def test_time_that_the_worker_does_not_tell_is_part_of_what_was_added() -> None:
    book = Book().send(0)
    book.ledger.answered(Answer(), 0.010)
    book.ledger.end()
    (timed,) = book.ledger.timed
    assert (timed.worker_ms, round(timed.added_ms, 3)) == (None, 10.0)


@pytest.mark.parametrize(
    "extra", [named(0, "audio"), named(7), named(-1)], ids=["same part", "not sent", "before all"]
)
def test_answer_too_many_is_counted(extra: Answer) -> None:
    book = Book().send(0)
    book.ledger.answered(named(0, "audio"), 0.01)
    book.ledger.answered(extra, 0.02)
    assert book.found() == {"sent": 1, "answered": 1, "doubled": 1}


def test_answer_without_a_name_when_nothing_waits_is_one_too_many() -> None:
    book = Book().send(0)
    book.ledger.answered(Answer(), 0.01)
    book.ledger.answered(Answer(), 0.02)
    assert book.found() == {"sent": 1, "answered": 1, "doubled": 1}


def test_dropped_units_are_the_oldest_before_the_answered_one() -> None:
    book = Book().send(0, 1, 2, 3)
    book.ledger.answered(named(2, "text", dropped_count=2), 2.01)
    book.ledger.answered(named(2, "audio", dropped_count=2), 2.02)  # the same drops, reported again
    book.ledger.answered(named(3), 3.01)
    assert book.found() == {"sent": 4, "answered": 2, "dropped": 2}


def test_units_from_the_answered_one_on_are_not_dropped() -> None:
    book = Book().send(0, 1)
    book.ledger.answered(named(0, dropped_count=2), 0.01)
    book.ledger.answered(named(1), 1.01)
    assert book.found() == {"sent": 2, "answered": 2}


def test_answers_without_a_name_skip_what_was_dropped() -> None:
    book = Book().send(0, 1)
    book.ledger.answered(Answer(dropped_count=1), 1.5)
    assert book.found() == {"sent": 2, "answered": 1, "dropped": 1}
    assert [round(one.latency_ms) for one in book.ledger.timed] == [500]


def test_dropped_unit_that_is_answered_too_has_no_time() -> None:
    book = Book().send(0, 1)
    book.ledger.answered(Answer(is_dropped=True), 1.1)
    book.ledger.answered(Answer(worker_ms=5.0), 1.2)
    assert book.found() == {"sent": 2, "answered": 1, "dropped": 1}
    assert [round(one.latency_ms) for one in book.ledger.timed] == [200]


def test_unit_that_failed_has_no_time() -> None:
    book = Book().send(0, 1)
    book.ledger.answered(Answer(unit=0, failure="INVALID_FIELD"), 0.1)
    assert book.found() == {"sent": 2, "failed": 1, "unanswered": 1}
    assert not book.ledger.timed


def test_warm_up_is_not_measured() -> None:
    book = Book().send(0, 1, 2, is_measured=False)
    book.ledger.answered(named(1, dropped_count=1), 5.0)
    assert book.found() == {}
    assert not book.ledger.timed


@pytest.mark.parametrize(
    ("stalled_s", "by_generator"), [(0.0, {}), (0.4, {}), (0.6, {"late_by_generator": 1})]
)
def test_late_unit_is_the_generators_if_it_stood_still_for_the_excess(
    stalled_s: float, by_generator: dict[str, int]
) -> None:
    book = Book(stalled_s).send(0)
    book.ledger.answered(named(0), 1.5)
    assert book.found() == {"sent": 1, "answered": 1, "late": 1} | by_generator


def test_counts_add_up() -> None:
    total = Counts(sent=1, late=2)
    total.add(Counts(sent=3, doubled=4))
    assert total == Counts(sent=4, late=2, doubled=4)
