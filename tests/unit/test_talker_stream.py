"""The talker in passages: what it says depends neither on the runs nor on who speaks beside it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from duplane.worker.model.checkpoint import Checkpoint, CheckpointError
from duplane.worker.model.sampling import SeededUniforms
from duplane.worker.model.speech_steps import REPETITION_WINDOW
from duplane.worker.model.talker import Talker, TalkerConfig
from duplane.worker.model.talker_stream import SpeechStream, advance

CHECKPOINT = Path(__file__).parents[1] / "golden" / "public" / "checkpoint"


@pytest.fixture(scope="module")
def talker() -> Talker:
    source = Checkpoint(CHECKPOINT)
    torch.set_num_threads(1)
    talker = Talker(source.config, 2, torch.device("cpu"), torch.float32)
    talker.load(source)
    return talker.requires_grad_(False).eval()


def condition(talker: Talker, seed: int, count: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, talker.dims.llm_hidden_size, generator=generator)
    return talker.condition(range(300 + seed, 300 + seed + count), hidden)


def stream(slot: int, seed: int) -> SpeechStream:
    return SpeechStream(slot, SeededUniforms(seed), is_greedy=False, temperature=0.9)


def passages(talker: Talker, spoken: SpeechStream, limit: int) -> list[list[int]]:
    """Three passages, each to its end."""
    talker.reset(spoken.slot)
    told: list[list[int]] = []
    for seed in range(3):
        spoken.say(condition(talker, seed), shortest=2, longest=40)
        tokens: list[int] = []
        while not spoken.is_silent:
            tokens += advance(talker, [spoken], limit)[0]
        told.append(tokens)
    talker.reset(spoken.slot)
    return told


def test_the_length_of_runs_does_not_show(talker: Talker) -> None:
    wanted = passages(talker, stream(0, 4), 25)
    assert all(2 <= len(tokens) <= 40 for tokens in wanted)
    for limit in (1, 7, 40):
        assert passages(talker, stream(1, 4), limit) == wanted


def test_two_speak_as_each_alone(talker: Talker) -> None:
    pair = [stream(0, 4), stream(1, 9)]
    alone = [passages(talker, spoken, 25)[0] for spoken in (stream(0, 4), stream(1, 9))]
    for spoken in pair:
        spoken.say(condition(talker, 0), shortest=2, longest=40)
    told: list[list[int]] = [[], []]
    while going := [spoken for spoken in pair if not spoken.is_silent]:
        for spoken, tokens in zip(going, advance(talker, going, 9), strict=True):
            told[spoken.slot] += tokens
    assert told == alone
    for slot in (0, 1):
        talker.reset(slot)


def test_a_passage_that_is_cut_off_goes_on_from_its_last_token(talker: Talker) -> None:
    spoken = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=0.8)
    rows = condition(talker, 1)
    spoken.say(rows, shortest=30, longest=30)
    first = advance(talker, [spoken], 30)[0]
    assert len(first) == 30
    assert spoken.unfed == first[-1]
    assert talker.cache.length(0) == len(rows) + 29
    assert spoken.said == first[-REPETITION_WINDOW:]
    spoken.say(rows, shortest=1, longest=1)
    advance(talker, [spoken], 1)
    assert talker.cache.length(0) == 2 * len(rows) + 30
    talker.reset(0)


@pytest.fixture
def recomputing(talker: Talker) -> Iterator[Talker]:
    """The same talker, in a checkpoint that says `sliding_recompute`."""
    dims = talker.dims
    talker.dims = replace(dims, is_recomputing=True)
    yield talker
    talker.dims = dims
    talker.reset(0)


@pytest.mark.parametrize("limit", [25, 3])
def test_recomputing_a_passage_is_spoken_over_the_one_before_alone(
    recomputing: Talker, limit: int
) -> None:
    talker = recomputing
    rows = [condition(talker, seed) for seed in range(4)]
    spoken = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=0.8)
    told: list[list[int]] = []
    lengths: list[int] = []
    for passage in rows:
        spoken.say(passage, shortest=2, longest=20)
        tokens: list[int] = []
        while not spoken.is_silent:
            tokens += advance(talker, [spoken], limit)[0]
        told.append(tokens)
        lengths.append(talker.cache.length(0))
    said: list[int] = []
    for number, passage in enumerate(rows):
        afresh = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=0.8)
        afresh.said = said[-REPETITION_WINDOW:]
        talker.reset(0)
        before = rows[number - 1 : number] if number else []
        heard = [talker.emb_code[0](torch.tensor(told[number - 1]))] if number else []
        afresh.say(torch.cat((*before, *heard, passage)), shortest=2, longest=20)
        assert advance(talker, [afresh], 20)[0] == told[number]
        assert talker.cache.length(0) == lengths[number]
        said += told[number]


def test_recomputing_is_heard(talker: Talker, recomputing: Talker) -> None:
    wanted = passages(recomputing, stream(0, 4), 25)
    recomputing.dims = replace(recomputing.dims, is_recomputing=False)
    assert passages(recomputing, stream(0, 4), 25) != wanted


@pytest.mark.parametrize("kind", ["sliding_window", "reindex", "other"])
def test_another_attention_is_refused_by_its_name(kind: str) -> None:
    config = dict(Checkpoint(CHECKPOINT).config)
    config["tts_config"] = {**config["tts_config"], "attention_type": kind}
    with pytest.raises(CheckpointError, match=f"attention_type is '{kind}'"):
        TalkerConfig.from_json(config, rows=64)


def test_without_a_word_about_it_the_default_of_the_reference_holds() -> None:
    config = dict(Checkpoint(CHECKPOINT).config)
    assert not TalkerConfig.from_json(config, rows=64).is_recomputing
    config["tts_config"] = dict(config["tts_config"])
    del config["tts_config"]["attention_type"]
    assert TalkerConfig.from_json(config, rows=64).is_recomputing


def test_a_second_passage_waits_for_the_first(talker: Talker) -> None:
    spoken = stream(0, 1)
    spoken.say(condition(talker, 1))
    with pytest.raises(ValueError, match="not finished"):
        spoken.say(condition(talker, 1))


def test_an_answer_longer_than_the_cache_goes_on_without_its_beginning(talker: Talker) -> None:
    spoken = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=0.8)
    rows = condition(talker, 2)
    longest = talker.cache.capacity
    spoken.say(rows, shortest=longest, longest=longest)
    capacity = talker.cache.capacity
    talker.cache.capacity = 128
    try:
        tokens: list[int] = []
        while len(tokens) < 300:
            tokens += advance(talker, [spoken])[0]
            assert talker.cache.length(0) <= 128
    finally:
        talker.cache.capacity = capacity
        talker.reset(0)
