"""The scores of an evaluation, for sessions with known results."""

from __future__ import annotations

from training.evaluation.scores import Answered, Expected, Scores, turns

LISTENS = Answered(speaks=False)
GOODBYE = Expected("goodbye", "goodbye", first_unit=2, unit_count=1)


def says(text: str, *, ends_turn: bool = True) -> Answered:
    return Answered(True, text, ends_turn)


def scored(expected: list[Expected], *units: Answered) -> Scores:
    scores = Scores()
    scores.add(expected, units)
    return scores


def test_units_of_a_turn_are_joined() -> None:
    units = [LISTENS, says("one two", ends_turn=False), says(" three"), LISTENS]
    (turn,) = turns(units)
    assert (turn.first_unit, turn.last_unit, turn.text) == (1, 2, "one two three")
    assert turn.is_ended


def test_turn_that_stops_without_its_end_is_not_ended() -> None:
    units = [says("one", ends_turn=False), LISTENS]
    (turn,) = turns(units)
    assert not turn.is_ended


def test_right_answer_one_unit_late_counts() -> None:
    scores = scored([GOODBYE], LISTENS, LISTENS, LISTENS, says("goodbye"), LISTENS)
    assert scores.onset.share == scores.exact.share == 1.0
    assert scores.extra_turns == 0


def test_answer_two_units_late_is_missing_and_extra() -> None:
    scores = scored([GOODBYE], LISTENS, LISTENS, LISTENS, LISTENS, says("goodbye"))
    assert scores.onset.share == scores.exact.share == 0.0
    assert scores.extra_turns == 1


def test_wrong_words_are_no_exact_answer() -> None:
    scores = scored([GOODBYE], LISTENS, LISTENS, says("good night"), LISTENS)
    assert scores.onset.share == 1.0
    assert scores.exact.share == 0.0
    assert scores.mistakes == [("goodbye", "good night")]


def test_words_of_an_interrupted_answer_are_not_judged() -> None:
    count = Expected("count", "one two three", 1, 3, interrupted_unit=2)
    scores = scored([count], LISTENS, says("one", ends_turn=False), says(""), LISTENS, LISTENS)
    assert scores.onset.share == 1.0
    assert scores.exact.count == scores.extra_turns == 0


def test_speech_in_noise_is_counted_by_units() -> None:
    scores = scored([], LISTENS, says("hello"), LISTENS, LISTENS)
    assert scores.quiet.share == 0.75
    assert scores.extra_turns == 1


def test_answer_that_the_session_cuts_off_does_not_count() -> None:
    scores = scored([GOODBYE], LISTENS, LISTENS)
    assert scores.onset.count == 0
    assert scores.extra_turns == 0
