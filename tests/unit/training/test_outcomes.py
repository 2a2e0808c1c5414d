"""What the model says after a question or an interruption is judged by its words."""

from __future__ import annotations

import pytest

from training.domain import UNKNOWN
from training.evaluation.outcomes import Outcome, Stopped, answer_of, spoken_units, stopped
from training.evaluation.scores import Answered

LISTENS = Answered(speaks=False)
COUNT = ("one two three four five", " six seven eight", " nine ten")
FIRST, NOTICED = 3, 4


def session(*texts: str, first: int = FIRST, count: int = 10) -> list[Answered]:
    """Return a session with one turn, which ends in its last unit."""
    units = [LISTENS] * count
    for number, text in enumerate(texts):
        units[first + number] = Answered(True, text, number == len(texts) - 1)
    return units


@pytest.mark.parametrize(
    ("said", "wanted", "outcome"),
    [
        ("goodbye", ("goodbye",), "right"),
        ("good night", ("goodbye",), "wrong"),
        (UNKNOWN, ("goodbye",), "sorry"),
        (UNKNOWN, (UNKNOWN,), "right"),
        ("goodbye", (UNKNOWN,), "wrong"),
        ("goodbye", (), "wrong"),
        ("goodbye", ("goodbye", "seven"), "one of two"),
        ("goodbye seven", ("goodbye", "seven"), "right"),
        ("seven goodbye", ("goodbye", "seven"), "wrong"),
    ],
    ids=str,
)
def test_words_decide(said: str, wanted: tuple[str, ...], outcome: Outcome) -> None:
    answer = answer_of(session(said), wanted, FIRST)
    assert answer.outcome == outcome
    assert answer.said == said
    assert answer.extra_turns == 0


def test_no_word_is_silence_and_right_only_where_silence_is_wanted() -> None:
    assert answer_of(session(), ("goodbye",), FIRST).outcome == "silent"
    assert answer_of(session(), (), FIRST).outcome == "right"


def test_two_turns_answer_two_questions_and_a_third_is_extra() -> None:
    units = session("goodbye")
    units[FIRST + 1] = units[FIRST + 3] = Answered(True, "seven", True)
    answer = answer_of(units, ("goodbye", "seven"), FIRST)
    assert (answer.outcome, answer.extra_turns) == ("right", 1)
    assert spoken_units(units) == 3


def test_turn_before_the_question_is_extra() -> None:
    units = session("goodbye")
    units[0] = Answered(True, "hello", True)
    answer = answer_of(units, ("goodbye",), FIRST)
    assert (answer.outcome, answer.extra_turns) == ("right", 1)


@pytest.mark.parametrize(
    ("texts", "alone", "result"),
    [
        (COUNT, COUNT, "spoken on"),
        ((COUNT[0], ""), COUNT, "cut"),
        ((*COUNT[:2], ""), COUNT, "cut"),
        ((*COUNT[:2], "", ""), COUNT, "spoken on"),
        (COUNT[:2], COUNT, "cut"),
        (COUNT[:1], COUNT[:1], "ended by itself"),
        ((*COUNT[:2], ""), (*COUNT[:2], ""), "ended by itself"),
        ((), COUNT, "ended by itself"),
        (COUNT, (), "ended by itself"),
    ],
    ids=[
        "deaf",
        "at once",
        "a unit later",
        "too late",
        "without more words",
        "short reply",
        "no words after the interruption",
        "no reply",
        "no reply alone",
    ],
)
def test_a_reply_is_cut_only_if_it_lacks_words(
    texts: tuple[str, ...], alone: tuple[str, ...], result: Stopped
) -> None:
    assert stopped(session(*texts), session(*alone), FIRST, NOTICED) == result


def test_turn_that_breaks_off_without_its_end_is_not_cut() -> None:
    units = session(COUNT[0])
    units[FIRST] = Answered(True, COUNT[0])
    assert stopped(units, session(*COUNT), FIRST, NOTICED) == "spoken on"
