"""A conversation has the same results in any of 64 slots, in any order and beside any others."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.model.pages import mixed_pages
from support.paths import GOLDEN
from support.speech import assert_probabilities_equal, assert_sounds_equal

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.llm import kv_cache
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions, DecodeMode, Unit, UnitOutput

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * UNIT)
SLOTS, CONVERSATIONS, ROUNDS = 64, 12, 5
SAMPLED = ConversationOptions(force_listen_count=0, temperature=0.9)
GREEDY = replace(SAMPLED, decode_mode=DecodeMode.GREEDY)

Played = list[list[UnitOutput]]
"""The outputs of each conversation."""


@pytest.fixture(scope="module")
def many(speaking_checkpoint: Path) -> DuplexModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "PAGE_ROWS", 32)
        return DuplexModel.load(speaking_checkpoint, slot_count=SLOTS, context_capacity=512)


@pytest.fixture(params=[False, True], ids=["neighbours", "mixed"], autouse=True)
def _pages(many: DuplexModel, request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the slots have neighbouring pages, or pages between those of others."""
    with mixed_pages(many, are_mixed=request.param):
        yield


def play(
    model: DuplexModel, slots: Sequence[int | None], rounds: Sequence[Sequence[int]]
) -> Played:
    """Run conversation i in `slots[i]` (None leaves it out). Each round runs some conversations."""
    taken = {slot: number for number, slot in enumerate(slots) if slot is not None}
    for slot, number in taken.items():
        model.open(slot, replace(GREEDY if number % 4 == 1 else SAMPLED, seed=number))
    outputs: Played = [[] for _ in slots]
    for running in rounds:
        units: list[Unit] = []
        for number in running:
            if (slot := slots[number]) is not None:
                second = 3 * number % 20 + len(outputs[number])
                units.append(Unit(slot, TALK[second * UNIT :][:UNIT]))
        for output in model.step(units):
            assert isinstance(output, UnitOutput), output
            outputs[taken[output.slot]].append(output)
        assert model.settle([unit.slot for unit in units]) == []
    for slot in taken:
        model.close(slot)
        assert model.is_clean(slot)
    return outputs


def random_rounds(draw: random.Random) -> list[list[int]]:
    """Return, for each round, a random subset of the conversations in random order."""
    counts = [draw.randint(1, CONVERSATIONS) for _ in range(ROUNDS)]
    return [draw.sample(range(CONVERSATIONS), count) for count in counts]


def assert_same(one: Played, other: Played, *, is_exact: bool) -> None:
    for ours, theirs in zip(one, other, strict=True):
        for output, want in zip(ours, theirs, strict=True):
            likely = want.listen_probability
            assert_probabilities_equal(output.listen_probability, likely)
            same = replace(output, slot=want.slot, audio=want.audio, listen_probability=likely)
            assert replace(same, stage_s={}) == replace(want, stage_s={})
            if is_exact:
                np.testing.assert_array_equal(output.audio, want.audio)
            else:
                assert_sounds_equal(output.audio, want.audio)


@pytest.mark.parametrize("seed", range(2))
def test_a_permutation_of_the_slots_changes_no_bit(many: DuplexModel, seed: int) -> None:
    draw = random.Random(seed)
    run = partial(play, many, rounds=random_rounds(draw))
    here, there = (draw.sample(range(SLOTS), CONVERSATIONS) for _ in range(2))
    played = run(here)
    assert any(len(output.audio) for outputs in played for output in outputs)
    assert_same(played, run(there), is_exact=True)
    assert_same(played, run(sorted(here)), is_exact=True)


@pytest.mark.parametrize("seed", range(2))
def test_a_conversation_says_in_a_random_subset_what_it_says_alone(
    many: DuplexModel, seed: int
) -> None:
    draw = random.Random(seed)
    rounds = random_rounds(draw)
    together = play(many, draw.sample(range(SLOTS), CONVERSATIONS), rounds)
    for number in range(CONVERSATIONS):
        slots = [SLOTS - 1 if other == number else None for other in range(CONVERSATIONS)]
        alone = play(many, slots, rounds)
        assert_same([together[number]], [alone[number]], is_exact=False)
