"""Makes small networks, and training data without a synthesiser: noise with invented times."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from training.answers import CODE_SAMPLES, Spoken
from training.corpus.store import Corpus, Recorded, write_corpus
from training.dimensions import default_config
from training.domain import all_answers, draw_trained_exchange, question_words
from training.vocabulary import Vocabulary

WORD_S = 0.25
WORDS_PER_UNIT = 4
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}
_SMALL_AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 64}


def small_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the configuration of a listener with few and narrow layers."""
    config = default_config(vocabulary.tokenizer)
    return config | _SMALL | {"audio_config": config["audio_config"] | _SMALL_AUDIO}


def fake_corpus(folder: Path, count: int = 40) -> Corpus:
    """Write and open a corpus whose words last a quarter of a second each."""
    chance = Random(1)
    numbers = np.random.default_rng(1)
    recorded: list[Recorded] = []
    for _ in range(count):
        exchange = draw_trained_exchange(chance, sight_share=0.2)
        words = exchange.question.split()
        samples = numbers.standard_normal(int(WORD_S * len(words) * 16_000)) * 0.1
        times = [WORD_S * number for number in range(len(words))]
        recorded.append(
            Recorded(
                exchange,
                "fake:voice",
                samples.astype(np.float32),
                WORD_S * len(words),
                tuple(zip(times, words, strict=True)),
                tuple((start, f"p{number % 3}") for number, start in enumerate(times)),
            )
        )
    write_corpus(folder, recorded, question_words())
    return Corpus(folder)


def fake_answers() -> dict[str, Spoken]:
    """Make every answer, with four words in each unit and noise as its sound."""
    answers: dict[str, Spoken] = {}
    for text in all_answers():
        words = text.split()
        units = tuple(
            tuple(words[start : start + WORDS_PER_UNIT])
            for start in range(0, len(words), WORDS_PER_UNIT)
        )
        count = 25 * (len(units) - 1) + 10
        answers[text] = Spoken(units, np.full(count * CODE_SAMPLES, 0.01, np.float32))
    return answers
