"""Questions and answers: each of their words is one known token, and answers fit their units."""

from __future__ import annotations

from random import Random

from training.domain import (
    HELD_OUT_WORDS,
    TRAINED_WORDS,
    UNKNOWN,
    all_answers,
    answer_words,
    draw_exchange,
    draw_trained_exchange,
    question_words,
)
from training.vocabulary import Vocabulary, build_tokenizer


def test_every_drawn_answer_is_listed() -> None:
    chance = Random(1)
    answers = {*all_answers(), ""}
    drawn = [draw_exchange(chance, TRAINED_WORDS) for _ in range(2000)]
    assert {one.answer for one in drawn} <= answers
    assert {"add", "count", "stop", "unknown", "name"} <= {one.kind for one in drawn}


def test_sums_are_right() -> None:
    chance = Random(2)
    drawn = [draw_exchange(chance, TRAINED_WORDS) for _ in range(2000)]
    assert "two plus three is five" in {one.answer for one in drawn if one.kind == "add"}
    assert "nine plus nine is eighteen" in all_answers()


def test_training_refuses_long_sentences() -> None:
    chance = Random(3)
    asked = [draw_trained_exchange(chance, sight_share=0.0) for _ in range(1000)]
    long = [one for one in asked if len(one.question.split()) > 8 and one.kind == "unknown"]
    assert len(long) > 10
    assert {one.answer for one in long} == {UNKNOWN}
    assert {word for one in long for word in one.question.split()} <= set(TRAINED_WORDS)


def test_unknown_words_of_tests_are_not_trained() -> None:
    assert not set(TRAINED_WORDS) & set(HELD_OUT_WORDS)
    assert not set(HELD_OUT_WORDS) & {"sky", "seven", "plus", "hello"}


def test_each_word_of_an_answer_is_one_token(vocabulary: Vocabulary) -> None:
    for word in answer_words():
        assert len(vocabulary.words([word], is_start=True)) == 1, word
        assert len(vocabulary.words([word], is_start=False)) == 1, word


def test_tokens_of_an_answer_decode_to_its_text(vocabulary: Vocabulary) -> None:
    ids = vocabulary.words(UNKNOWN.split(), is_start=True)
    assert vocabulary.tokenizer.decode(ids) == UNKNOWN


def test_any_prompt_can_be_encoded(vocabulary: Vocabulary) -> None:
    for prompt in ("", "Répondez en français!", "You are a pirate. \U0001f99c", "你好"):
        assert vocabulary.tokenizer.decode(vocabulary.encode(prompt)) == prompt


def test_tokenizer_is_the_same_each_time(vocabulary: Vocabulary) -> None:
    assert build_tokenizer().to_str() == vocabulary.tokenizer.to_str()


def test_question_words_have_no_duplicates() -> None:
    words = question_words()
    assert len(words) == len(set(words))
    assert {"ten", "sky", "repeat", "stop"} <= set(words)
