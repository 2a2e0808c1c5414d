"""The results of tries: what the model said after a question, or after an interruption. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from training.domain import UNKNOWN
from training.evaluation.scores import Answered, Turn, turns

Outcome = Literal["right", "one of two", "wrong", "sorry", "silent"]
Stopped = Literal["cut", "spoken on", "ended by itself"]
LATE_UNITS = 1
"""A reply may end this many units after the unit in which the interruption can be noticed."""


@dataclass(frozen=True)
class Answer:
    """What the model said to a question, and its number of turns that answer nothing."""

    outcome: Outcome
    said: str
    extra_turns: int


def answer_of(units: Sequence[Answered], wanted: Sequence[str], first_unit: int) -> Answer:
    """Judge a session with one question, or with two that follow each other at once.

    `wanted` has their answers; it is empty for a request for silence. `first_unit` is the unit in
    which the first answer should begin. A refusal is "right" only where it is wanted.
    """
    found = turns(units)
    after = [turn for turn in found if turn.first_unit >= first_unit - 1]
    if not wanted:
        return Answer("wrong" if after else "right", _said(after), len(found) - len(after))
    used = after[: len(wanted)] or found[-1:]
    said = _said(used)
    if said == " ".join(wanted):
        outcome: Outcome = "right"
    elif not used:
        outcome = "silent"
    elif len(wanted) > 1 and said in wanted:
        outcome = "one of two"
    elif all(turn.text == UNKNOWN for turn in used):
        outcome = "sorry"
    else:
        outcome = "wrong"
    return Answer(outcome, said, len(found) - len(used))


def _said(found: Sequence[Turn]) -> str:
    return " ".join(turn.text for turn in found)


def stopped(
    units: Sequence[Answered], alone: Sequence[Answered], first_unit: int, noticed_unit: int
) -> Stopped:
    """Judge an interruption by what the model did not speak.

    `alone` is the result of the same session without the interruption, which can be noticed in
    `noticed_unit`. If that reply has no words after this unit, the try says nothing about
    interruptions. Else the reply is cut if it lacks words of that reply, and ends in time.
    """
    whole = _turn_near(turns(alone), first_unit)
    if whole is None or _words_by(alone, whole, noticed_unit) == whole.text.split():
        return "ended by itself"
    said = _turn_near(turns(units), first_unit)
    if said is None or said.first_unit >= noticed_unit:
        return "ended by itself"
    is_short = len(said.text.split()) < len(whole.text.split())
    is_in_time = said.is_ended and said.last_unit <= noticed_unit + LATE_UNITS
    return "cut" if is_short and is_in_time else "spoken on"


def _turn_near(found: Sequence[Turn], first_unit: int) -> Turn | None:
    near = [turn for turn in found if abs(turn.first_unit - first_unit) <= 1]
    return near[0] if near else None


def _words_by(units: Sequence[Answered], turn: Turn, last: int) -> list[str]:
    """Return the words of a turn up to a unit."""
    return "".join(unit.text for unit in units[turn.first_unit : last + 1]).split()


def spoken_units(units: Sequence[Answered]) -> int:
    """Return the number of units in which the model speaks."""
    return sum(unit.speaks for unit in units)
