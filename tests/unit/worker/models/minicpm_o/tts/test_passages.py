"""Passages, which are the talker's parts of a chat answer.

Their tokens depend neither on the limit per call nor on the other slots.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.paths import GOLDEN

from duplane.worker.models.minicpm_o.checkpoint import Checkpoint, CheckpointError
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.tts.passages import SpeechStream, advance
from duplane.worker.models.minicpm_o.tts.sampling import REPETITION_WINDOW
from duplane.worker.models.minicpm_o.tts.talker import Talker, TalkerConfig

CHECKPOINT = GOLDEN / "checkpoint"


@pytest.fixture(scope="module")
def talker() -> Talker:
    source = Checkpoint(CHECKPOINT)
    talker = Talker(source.config, 2, torch.device("cpu"), torch.float32)
    talker.load(source)
    return talker.requires_grad_(False).eval()


def condition(talker: Talker, seed: int, count: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, talker.dims.llm_hidden_size, generator=generator)
    return talker.condition(range(300 + seed, 300 + seed + count), hidden)


def stream(slot: int, seed: int) -> SpeechStream:
    return SpeechStream(slot, SeededUniforms(seed), is_greedy=False, temperature=0.9)


def passages(talker: Talker, speech: SpeechStream, limit: int) -> list[list[int]]:
    """Draw three passages, each to its end."""
    talker.cache.reset(speech.slot)
    tokens_of: list[list[int]] = []
    for seed in range(3):
        speech.begin(condition(talker, seed), fewest=2, most=40)
        tokens: list[int] = []
        while not speech.is_done:
            tokens += advance(talker, [speech], limit)[0]
        tokens_of.append(tokens)
    talker.cache.reset(speech.slot)
    return tokens_of


def test_tokens_do_not_depend_on_the_limit_per_call(talker: Talker) -> None:
    wanted = passages(talker, stream(0, 4), 25)
    assert all(2 <= len(tokens) <= 40 for tokens in wanted)
    for limit in (1, 7, 40):
        assert passages(talker, stream(1, 4), limit) == wanted


def test_tokens_do_not_depend_on_the_other_slot(talker: Talker) -> None:
    pair = [stream(0, 4), stream(1, 9)]
    alone = [passages(talker, speech, 25)[0] for speech in (stream(0, 4), stream(1, 9))]
    for speech in pair:
        speech.begin(condition(talker, 0), fewest=2, most=40)
    tokens_of: list[list[int]] = [[], []]
    while going := [speech for speech in pair if not speech.is_done]:
        for speech, tokens in zip(going, advance(talker, going, 9), strict=True):
            tokens_of[speech.slot] += tokens
    assert tokens_of == alone
    for slot in (0, 1):
        talker.cache.reset(slot)


def test_after_a_cut_off_passage_the_last_token_is_fed_with_the_next_one(talker: Talker) -> None:
    speech = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=0.8)
    rows = condition(talker, 1)
    speech.begin(rows, fewest=30, most=30)
    first = advance(talker, [speech], 30)[0]
    assert len(first) == 30
    assert speech.unfed == first[-1]
    assert talker.cache.length(0) == len(rows) + 29
    assert speech.history == first[-REPETITION_WINDOW:]
    speech.begin(rows, fewest=1, most=1)
    advance(talker, [speech], 1)
    assert talker.cache.length(0) == 2 * len(rows) + 30
    talker.cache.reset(0)


@pytest.fixture
def recomputing(talker: Talker) -> Iterator[Talker]:
    """Return the same talker with the attention type `sliding_recompute`."""
    dims = talker.dims
    talker.dims = replace(dims, is_recomputing=True)
    yield talker
    talker.dims = dims
    talker.cache.reset(0)


@pytest.mark.parametrize("limit", [25, 3])
def test_recomputing_attends_only_to_the_passage_before(recomputing: Talker, limit: int) -> None:
    talker = recomputing
    rows = [condition(talker, seed) for seed in range(4)]
    speech = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=0.8)
    tokens_of: list[list[int]] = []
    lengths: list[int] = []
    for passage in rows:
        speech.begin(passage, fewest=2, most=20)
        tokens: list[int] = []
        while not speech.is_done:
            tokens += advance(talker, [speech], limit)[0]
        tokens_of.append(tokens)
        lengths.append(talker.cache.length(0))
    history: list[int] = []
    for number, passage in enumerate(rows):
        fresh = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=0.8)
        fresh.history = history[-REPETITION_WINDOW:]
        talker.cache.reset(0)
        before = rows[number - 1 : number] if number else []
        earlier = [talker.emb_code[0](torch.tensor(tokens_of[number - 1]))] if number else []
        fresh.begin(torch.cat((*before, *earlier, passage)), fewest=2, most=20)
        assert advance(talker, [fresh], 20)[0] == tokens_of[number]
        assert talker.cache.length(0) == lengths[number]
        history += tokens_of[number]


def test_recomputing_changes_the_tokens(talker: Talker, recomputing: Talker) -> None:
    wanted = passages(recomputing, stream(0, 4), 25)
    recomputing.dims = replace(recomputing.dims, is_recomputing=False)
    assert passages(recomputing, stream(0, 4), 25) != wanted


@pytest.mark.parametrize("kind", ["sliding_window", "reindex", "other"])
def test_an_unsupported_attention_type_is_refused_by_name(kind: str) -> None:
    config = dict(Checkpoint(CHECKPOINT).config)
    config["tts_config"] = {**config["tts_config"], "attention_type": kind}
    with pytest.raises(CheckpointError, match=f"attention_type is '{kind}'"):
        TalkerConfig.from_json(config, rows=64)


def test_an_absent_attention_type_means_the_default_of_the_reference() -> None:
    config = dict(Checkpoint(CHECKPOINT).config)
    assert not TalkerConfig.from_json(config, rows=64).is_recomputing
    config["tts_config"] = dict(config["tts_config"])
    del config["tts_config"]["attention_type"]
    assert TalkerConfig.from_json(config, rows=64).is_recomputing


def test_a_passage_cannot_begin_before_the_last_has_ended(talker: Talker) -> None:
    speech = stream(0, 1)
    speech.begin(condition(talker, 1))
    with pytest.raises(ValueError, match="not finished"):
        speech.begin(condition(talker, 1))


def test_an_answer_longer_than_the_cache_continues_without_its_earlier_rows(talker: Talker) -> None:
    speech = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=0.8)
    rows = condition(talker, 2)
    most = talker.cache.capacity
    speech.begin(rows, fewest=most, most=most)
    capacity = talker.cache.capacity
    talker.cache.capacity = 128
    try:
        tokens: list[int] = []
        while len(tokens) < 300:
            tokens += advance(talker, [speech])[0]
            assert talker.cache.length(0) <= 128
    finally:
        talker.cache.capacity = capacity
        talker.cache.reset(0)
