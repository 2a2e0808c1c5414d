"""The talker as a block: one upload, all steps without a wait, and one download."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.model.fake_cuda import DEVICE, Way, elsewhere
from support.model.talkers import small_talker

from duplane.tools.bench.launches import attend_to_pages
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.tts.block import TalkBlock
from duplane.worker.models.minicpm_o.tts.sampling import SpeechRequest
from duplane.worker.models.minicpm_o.tts.talker import Talker

pytestmark = pytest.mark.slow

SLOTS = 5


def requests(talker: Talker, slots: tuple[int, ...]) -> list[SpeechRequest]:
    """Return requests that differ in all settings."""
    states = torch.ones(SLOTS, 12, device=talker.emb_text.weight.device)
    return [
        SpeechRequest(
            slot,
            talker.condition(range(slot, 2 * slot), states[:slot].unbind()),
            SeededUniforms(slot),
            is_greedy=slot == 1,
            temperature=0.5 + slot / 10,
            most=26 - slot,
            history=[3, 4] * slot,
            filtered_from=None if slot == 2 else slot,
        )
        for slot in slots
    ]


@torch.inference_mode()
def test_a_block_draws_what_plain_passes_draw_with_one_upload_and_one_download() -> None:
    here, rounds = small_talker(SLOTS), ((0, 2, 4), (0, 1, 2, 3, 4), (3,), (1, 4))
    with elsewhere() as border:
        there = small_talker(SLOTS, DEVICE)
        there.cache.kernel = attend_to_pages
        TalkBlock(there).capture()
        for number, slots in enumerate(rounds):
            given = [requests(talker, slots) for talker in (here, there)]
            border.crossings.clear()
            got = there.draw(given[1])
            assert got == here.draw(given[0])
            lengths = [[talker.cache.length(slot) for slot in slots] for talker in (here, there)]
            assert lengths[0] == lengths[1]
            if number > 1:  # all slots have their pages
                assert [(one.way, one.where) for one in border.crossings] == [
                    (Way.UP, "transfer.py refill"),
                    (Way.DOWN, "transfer.py download"),
                ]


@torch.inference_mode()
def test_speech_that_ends_early_is_cut_by_the_host() -> None:
    """Another slot needs more steps. The first one draws in these too, but returns only its own."""
    talker = small_talker(SLOTS)
    talker.cache.kernel = attend_to_pages
    TalkBlock(talker).capture(is_replayed=False)
    plain = small_talker(SLOTS)
    lengths: set[int] = set()
    for seed in range(4):
        spoken: list[list[list[int]]] = []
        ahead: list[list[list[float]]] = []
        for one in (talker, plain):
            given = [
                replace(
                    request,
                    uniforms=SeededUniforms(10 * seed + request.slot),
                    is_turn_end=True,
                    temperature=4.0,
                    filtered_from=None,
                )
                for request in requests(one, (0, 3))
            ]
            spoken.append(one.speak(given))
            ahead.append([request.uniforms.peek(2) for request in given])
            assert [one.cache.length(slot) for slot in (0, 3)] == [0, 0]
        assert spoken[0] == spoken[1]
        assert ahead[0] == ahead[1], "draws of steps that are cut are not consumed"
        lengths |= {len(tokens) for tokens in spoken[0]}
    assert len(lengths) > 2
