"""The conversations of the evaluation are drawn by seed, with words that the training lacks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from support.training import fake_answers, fake_corpus

from duplane.tools.checkpoint.text import PROSE
from training.domain import TRAINED_WORDS, answer_words, question_words
from training.evaluation.inputs import USUAL_PROMPT
from training.evaluation.rows import (
    PROMPTS,
    EvaluationPlan,
    SessionSource,
    draw_chats,
    session_rows,
)
from training.evaluation.scores import Rate, Scores
from training.evaluation.table import CHATS, as_text, as_values
from training.listener.noises import NoiseBank
from training.listener.sequences import COMMON_PROMPTS


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def test_training_lacks_at_least_half_of_the_words_of_each_prompt() -> None:
    trained = {*TRAINED_WORDS, *question_words(), *answer_words(), *words(PROSE)}
    trained.update(word for prompt in COMMON_PROMPTS for word in words(prompt))
    for prompt in PROMPTS:
        unknown = [word for word in words(prompt) if word not in trained]
        assert 2 * len(unknown) >= len(words(prompt)), prompt


def test_rows_draw_their_prompts_and_reference_audio(tmp_path: Path) -> None:
    corpus = fake_corpus(tmp_path)
    source = SessionSource(
        {"espeak": corpus, "flite": corpus}, fake_answers(), NoiseBank(seed=1, count=2)
    )
    rows = {row.name: row for row in session_rows(EvaluationPlan(sessions=4))}

    usual = source.draw(rows["unheard voices"], seed=7)
    assert [given.seed for given, _ in usual] == [7, 8, 9, 10]
    assert any(expected for _, expected in usual)

    def settings(name: str) -> list[tuple[str, bool]]:
        found = source.draw(rows[name], seed=7)
        for (given, expected), (usually, wanted) in zip(found, usual, strict=True):
            assert np.array_equal(given.samples, usually.samples)
            assert (given.seed, expected) == (usually.seed, wanted)
        return [(given.prompt, given.voice is not None) for given, _ in found]

    assert settings("unheard voices") == [(USUAL_PROMPT, False)] * 4
    assert settings("unknown system prompts") == [(prompt, False) for prompt in PROMPTS[:4]]
    assert settings("unknown reference audio") == [(USUAL_PROMPT, True)] * 4
    sounds = [source.draw(row, seed=7)[0][0].samples for row in rows.values() if row.draw]
    assert not any(np.array_equal(sound, usual[0][0].samples) for sound in sounds)


def test_all_questions_of_chats_have_answers() -> None:
    chats = draw_chats(200, seed=3)
    assert chats == draw_chats(200, seed=3) != draw_chats(200, seed=4)
    roles = {tuple(role for role, _ in given.messages) for given, _ in chats}
    earlier = ("user", "assistant")
    assert roles == {
        ("user",),
        ("system", "user"),
        (*earlier, "user"),
        ("system", *earlier, "user"),
    }
    assert all(exchange.answer for _, exchange in chats)
    assert all(text for given, _ in chats for _, text in given.messages)
    # A system prompt and speech occur in every combination.
    kinds = [(given.messages[0][0] == "system", given.is_spoken) for given, _ in chats]
    assert [kinds.count(kind) for kind in sorted(set(kinds))] == [50] * 4


def test_table_names_the_path_and_scores_chats_by_their_text() -> None:
    scores = Scores()
    scores.add_answer("hello", "hello", "hello")
    scores.add_answer("add", "one plus one is two", "one")
    rate = {"share": None, **vars(Rate())}
    found = {
        "through": "fabric",
        "rows": {CHATS: as_values(scores)},
        "speech": {
            "sums understood": {"model": rate},
            "words recognised": {"model": rate},
            "mel distance": 0.5,
        },
    }
    heading, row, *_ = as_text(found).splitlines()
    assert heading.startswith("through the fabric")
    assert " ".join(row.split()) == f"{CHATS} - 50.0 % of 2 - -"
    assert scores.mistakes == [("one plus one is two", "one")]
