"""The talker: batches, cache contents, draws and the repetition penalty."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.model.talkers import CONFIG, small_talker
from torch import Tensor

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.tts.sampling import TOKENS_PER_UNIT, SpeechRequest, penalise
from duplane.worker.models.minicpm_o.tts.talker import Talker

pytestmark = pytest.mark.slow


def condition(talker: Talker, seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 39, (count,), generator=generator).tolist()
    return talker.condition(ids, torch.randn(count, 12, generator=generator))


def request(talker: Talker, slot: int, seed: int, count: int) -> SpeechRequest:
    rows = condition(talker, seed, count)
    return SpeechRequest(slot, rows, SeededUniforms(seed), slot % 2 == 0, 0.8)


def test_tokens_do_not_depend_on_the_other_slots() -> None:
    together = small_talker(4)
    requests = [request(together, slot, 10 + slot, slot) for slot in range(4)]
    first = together.speak(requests)
    again = together.speak([replace(one, is_turn_end=True) for one in requests[1:]])
    for slot in range(4):
        alone = small_talker(4)
        own = request(alone, slot, 10 + slot, slot)
        assert alone.speak([own]) == [first[slot]]
        if slot:
            assert alone.speak([replace(own, is_turn_end=True)]) == [again[slot - 1]]
            assert together.cache.length(slot) == 0
    assert any(len(tokens) == TOKENS_PER_UNIT for tokens in first)


def test_the_cache_holds_the_condition_and_the_tokens_returned() -> None:
    talker = small_talker(4)
    spoken = talker.speak([request(talker, 1, 5, 6)])[0]
    assert talker.cache.length(1) == 7 + len(spoken)
    more = talker.speak([request(talker, 1, 6, 2)])[0]
    assert len(more) == TOKENS_PER_UNIT, "speech does not end early inside a turn"
    assert talker.end not in spoken + more


def test_a_turn_longer_than_the_cache_continues() -> None:
    talker = small_talker(4)
    lengths: list[int] = []
    for seed in range(6):
        talker.speak([request(talker, 0, seed, 9)])
        lengths.append(talker.cache.length(0))
    assert max(lengths) <= talker.cache.capacity
    assert any(after < before for before, after in pairwise(lengths))


def test_each_token_returned_and_the_dropped_one_use_one_uniform() -> None:
    talker, uniforms = small_talker(4), SeededUniforms(1)
    spoken = talker.speak([replace(request(talker, 1, 5, 3), uniforms=uniforms)])[0]
    fresh = SeededUniforms(1)
    fresh.advance(len(spoken) + 1)
    assert uniforms.peek(3) == fresh.peek(3)
    greedy = SeededUniforms(1)
    talker.speak([replace(request(talker, 0, 5, 3), uniforms=greedy)])
    assert greedy.peek(3) == SeededUniforms(1).peek(3)


def test_the_penalty_counts_occurrences_and_depends_on_the_sign() -> None:
    scores = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    got = penalise(scores, torch.tensor([[2, 0, 0, 1, 3]]), torch.tensor([0, 1, 1, 1, 0]) > 0)
    expected = torch.tensor([[2.0 / 1.05**2, -2.0 * 1.05, 1.0, -1.0]])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "change", [{"num_vq": 2}, {"projector_type": "minicpm"}, {"llm_dim": None}]
)
def test_an_unsupported_talker_is_refused(change: dict[str, object]) -> None:
    config = {"tts_config": {**CONFIG["tts_config"], **change}}
    with pytest.raises(CheckpointError):
        Talker(config, 1, torch.device("cpu"), torch.float32)
