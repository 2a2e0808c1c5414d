"""Voices, accents, words, digits and sums to refuse of the evaluation do not occur in training.

Both draw their questions with `draw_recording` and `draw_exchange`, so these draws are compared.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from training.corpus import recording
from training.corpus.recording import CorpusPlan, draw_recording
from training.corpus.store import Recorded
from training.corpus.voices import FAMILIES, HELD_OUT_VARIANTS, VARIANTS, Speaker
from training.domain import (
    HELD_OUT_WORDS,
    KINDS,
    OPENINGS,
    TRAINED_WORDS,
    Exchange,
    answer_words,
    draw_exchange,
    draw_near,
    is_held_out,
    question_words,
)

COUNT = 1200


def test_variants_that_sound_alike_are_on_one_side() -> None:
    for family in FAMILIES:
        assert not family & set(HELD_OUT_VARIANTS), family
    assert not set(VARIANTS) & set(HELD_OUT_VARIANTS)


def test_held_out_words_occur_in_no_text_of_training() -> None:
    trained = {*TRAINED_WORDS, *question_words(), *answer_words(), *" ".join(OPENINGS).split()}
    assert not trained & set(HELD_OUT_WORDS)


def drawn(*, held_out: bool, patch: pytest.MonkeyPatch) -> list[tuple[Exchange, Speaker]]:
    """Return what the corpus of training, or of the evaluation, asks the synthesisers to speak."""
    asked: list[tuple[Exchange, Speaker]] = []

    def record(exchange: Exchange, speaker: Speaker) -> Recorded:
        asked.append((exchange, speaker))
        return Recorded(exchange, speaker.voice, np.full(9, 0.1, np.float32), 0.0, (), ())

    patch.setattr(recording, "record", record)
    plan = CorpusPlan(
        COUNT, seed=1, is_held_out=held_out, coloured_share=0.0, reverberant_share=0.0
    )
    for index in range(COUNT):
        draw_recording(index, plan)
    return asked


def test_corpora_share_no_voice_accent_or_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = drawn(held_out=False, patch=monkeypatch)
    judged = drawn(held_out=True, patch=monkeypatch)

    def parts(asked: list[tuple[Exchange, Speaker]], number: int) -> set[str]:
        return {
            one.voice.split("+")[number] for _, one in asked if one.voice.count("+") or not number
        }

    for number in (0, 1):  # accent, variant; a voice of flite has no variant
        assert parts(trained, number)
        assert parts(judged, number)
        assert not parts(trained, number) & parts(judged, number)
    repeated = [
        {one.answer for one, _ in asked if one.kind == "repeat" and len(one.answer.split()) > 1}
        for asked in (trained, judged)
    ]
    assert all(repeated)
    assert not repeated[0] & repeated[1]
    unknown = [
        {word for one, _ in asked if one.kind == "unknown" for word in one.question.split()}
        for asked in (trained, judged)
    ]
    assert not (unknown[0] & unknown[1]) - set(" ".join(OPENINGS).split())


def test_sums_to_refuse_are_apart() -> None:
    chance = Random(3)
    trained, judged = (
        {
            frozenset(one.question.removeprefix("what is ").split(" plus "))
            for one in (draw_near(chance, held_out=held_out) for _ in range(COUNT))
            if " plus " in one.question
        }
        for held_out in (False, True)
    )
    assert len(judged) > 50
    assert not trained & judged


def test_typed_questions_of_training_lack_the_held_out_ones() -> None:
    chance = Random(2)
    asked = [draw_exchange(chance, TRAINED_WORDS) for _ in range(COUNT)]
    assert not any(is_held_out(one) for one in asked)
    judged = [draw_exchange(chance, HELD_OUT_WORDS, held_out=True) for _ in range(COUNT)]
    apart = {one.kind for one in judged if is_held_out(one)}
    assert apart == {"repeat"}
    assert {one.kind for one in judged} == {*KINDS, "unknown"}
