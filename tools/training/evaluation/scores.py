"""Compares the model's turns in a session with the expected answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Answered:
    """The output of one unit."""

    speaks: bool
    text: str = ""
    ends_turn: bool = False


@dataclass(frozen=True)
class Expected:
    """The expected answer to a question: its first unit and its number of units.

    `interrupted_unit` is the unit in which an interruption ends the answer, or -1. The words of an
    interrupted answer are not judged here: most answers are too short (`outcomes.stopped`).
    """

    kind: str
    text: str
    first_unit: int
    unit_count: int
    interrupted_unit: int = -1


@dataclass(frozen=True)
class Turn:
    """A turn of the model: its first and last unit, and its text."""

    first_unit: int
    last_unit: int
    text: str
    is_ended: bool


@dataclass
class Rate:
    """The number of correct results and of all results."""

    right: int = 0
    count: int = 0

    def add(self, *, is_right: bool) -> None:
        """Add one result."""
        self.right += is_right
        self.count += 1

    @property
    def share(self) -> float | None:
        """The share of correct results; None if there are no results."""
        return self.right / self.count if self.count else None


@dataclass
class Scores:
    """The scores of some sessions."""

    onset: Rate = field(default_factory=Rate)
    exact: Rate = field(default_factory=Rate)
    quiet: Rate = field(default_factory=Rate)
    kinds: dict[str, Rate] = field(default_factory=dict[str, Rate])
    extra_turns: int = 0
    unit_count: int = 0
    mistakes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def add(self, expected: Sequence[Expected], units: Sequence[Answered]) -> None:
        """Score one session."""
        self.unit_count += len(units)
        found = turns(units)
        matched: set[int] = set()
        for answer in expected:
            if answer.first_unit + answer.unit_count > len(units):
                continue
            near = [
                index
                for index, turn in enumerate(found)
                if abs(turn.first_unit - answer.first_unit) <= 1 and index not in matched
            ]
            self.onset.add(is_right=bool(near))
            turn = found[near[0]] if near else None
            matched.update(near[:1])
            if answer.interrupted_unit < 0:
                self.add_answer(answer.kind, answer.text, "" if turn is None else turn.text)
        later = [one for one in expected if one.first_unit + one.unit_count > len(units)]
        for index, turn in enumerate(found):
            is_known = any(abs(turn.first_unit - one.first_unit) <= 1 for one in later)
            self.extra_turns += index not in matched and not is_known
        if not expected:
            for unit in units:
                self.quiet.add(is_right=not unit.speaks)

    def add_answer(self, kind: str, wanted: str, said: str) -> None:
        """Score the text of one answer to a question of this kind."""
        is_exact = said == wanted
        self.exact.add(is_right=is_exact)
        self.kinds.setdefault(kind, Rate()).add(is_right=is_exact)
        if not is_exact:
            self.mistakes.append((wanted, said))


def turns(units: Sequence[Answered]) -> list[Turn]:
    """Group the speaking units into turns."""
    found: list[Turn] = []
    first = -1
    text = ""
    for number, unit in enumerate(units):
        if not unit.speaks:
            if first >= 0:
                found.append(Turn(first, number - 1, text, is_ended=False))
                first = -1
            continue
        first, text = (number, "") if first < 0 else (first, text)
        text += unit.text
        if unit.ends_turn:
            found.append(Turn(first, number, text.strip(), is_ended=True))
            first = -1
    if first >= 0:
        found.append(Turn(first, len(units) - 1, text, is_ended=False))
    return found
