"""The talker's training predicts what the worker draws, from phrases that the evaluation lacks."""

from __future__ import annotations

import pytest
import torch

from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.tts.sampling import TOKENS_PER_UNIT, UNIT_DRAWS, SpeechRequest
from duplane.worker.models.minicpm_o.tts.talker import Talker
from training.dimensions import default_config
from training.domain import all_answers, answer_words, sums
from training.vocabulary import Vocabulary, build_tokenizer
from training.voice.phrases import LONGEST_PHRASE, draw_phrases, held_out_answers
from training.voice.talker import CodedAnswer, TalkerPlan, TalkerTraining

WORDS = ("two", "plus")


@torch.no_grad()
def test_training_predicts_the_tokens_that_the_worker_draws() -> None:
    """The worker's repetition penalty changes these tokens, so training must apply it too."""
    vocabulary = Vocabulary(build_tokenizer())
    config = default_config(vocabulary.tokenizer)
    training = TalkerTraining(config, vocabulary, TalkerPlan())
    training.store_head()
    served = Talker(config, 1, torch.device("cpu"), torch.float32)
    served.load_state_dict(training.talker.state_dict())
    served.fold()
    ids = [*vocabulary.words(WORDS, is_start=True), vocabulary.turn_eos]
    condition = served.condition(ids, torch.zeros(len(ids), config["hidden_size"]))
    request = SpeechRequest(
        0, condition, SeededUniforms(1), is_greedy=True, temperature=1.0, fewest=UNIT_DRAWS
    )
    drawn = served.draw([request])[0][:TOKENS_PER_UNIT]
    _, right = training.evaluate([CodedAnswer((WORDS,), drawn)])
    # The last target is the end of speech, which the worker may not draw here.
    assert right == pytest.approx(TOKENS_PER_UNIT / (TOKENS_PER_UNIT + 1))


def test_phrases_contain_no_text_of_the_evaluation() -> None:
    phrases = draw_phrases(500, 1)
    assert len(set(phrases)) == 500
    texts = [*held_out_answers(), *(question for question, _ in sums())]
    for phrase in phrases:
        assert not any(f" {text} " in f" {phrase} " for text in texts)
        assert set(phrase.split()) <= set(answer_words())
        assert len(phrase.split()) <= LONGEST_PHRASE
    assert set(phrases).isdisjoint(all_answers())
    assert draw_phrases(500, 1) == phrases != draw_phrases(500, 2)
