"""Phrases that the talker practises beside the answers, so that it can say words in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from training.domain import DIGITS, all_answers, answer_words, heard_answers, sums

LONGEST_PHRASE = 6
HELD_OUT_STRIDE, HELD_OUT_FIRST = 16, 5


def held_out_answers() -> list[str]:
    """Return the answers that the talker's training leaves out: some triples of digits."""
    texts = heard_answers()[HELD_OUT_FIRST::HELD_OUT_STRIDE]
    return [text for text in texts if len(text.split()) == 3 and set(text.split()) <= set(DIGITS)]


def draw_phrases(count: int, seed: int) -> list[str]:
    """Return `count` different phrases, sorted.

    No phrase contains a held-out answer or the question of a sum: the evaluation measures how the
    model speaks these.
    """
    chance = Random(seed)
    found = set[str]()
    answers = [text.split() for text in all_answers()]
    known = set(all_answers())
    words = answer_words()
    texts = [*held_out_answers(), *(question for question, _ in sums())]
    held_out = {tuple(text.split()) for text in texts}
    while len(found) < count:
        drawn = _draw(chance, answers, words)
        text = " ".join(drawn)
        if text not in known and held_out.isdisjoint(_triples(drawn)):
            found.add(text)
    return sorted(found)


def _draw(chance: Random, answers: Sequence[Sequence[str]], words: Sequence[str]) -> list[str]:
    """Draw digits, words in a random order, or parts of two answers."""
    length = chance.randint(1, LONGEST_PHRASE)
    kind = chance.random()
    if kind < 0.25:
        return chance.choices(DIGITS, k=length)
    if kind < 0.6:
        return chance.choices(words, k=length)
    return [*_part(chance, answers), *_part(chance, answers)][:LONGEST_PHRASE]


def _part(chance: Random, answers: Sequence[Sequence[str]]) -> Sequence[str]:
    # Few answers have words that are not digits, so half of the parts come from these.
    answer = chance.choice(answers)
    while set(answer) <= set(DIGITS) and chance.random() < 0.9:
        answer = chance.choice(answers)
    start = chance.randrange(len(answer))
    return answer[start : chance.randint(start, len(answer)) + 1]


def _triples(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return zip(words, words[1:], words[2:], strict=False)
