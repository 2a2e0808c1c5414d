"""Two conversations that speak in one batch are rebuilt: nothing of their state is lost.

In a batch, the vocoder rounds its sums in another order than alone, so samples differ slightly from
those of the same conversation alone. This has nothing to do with a rebuild: if the vocoder computes
one conversation after the other, the samples after a rebuild are exactly the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.model.pages import mix_pages
from support.model.past_units import RanUnit, assert_same_units, past_units, rebuild
from support.paths import GOLDEN

from duplane.tools.bench.launches import caches
from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.llm import kv_cache
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions, Unit, UnitOutput

pytestmark = pytest.mark.slow

SAMPLES = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * SAMPLES)
FIRST = ConversationOptions(
    "Streaming Omni Conversation.", seed=7, force_listen_count=1, temperature=1.2, top_p=0.95
)
TALKERS = (FIRST, replace(FIRST, seed=23))
SHIFT = 5  # units by which the second talker hears the recording earlier
UNITS = 20
NEXT = 2
"""Number of units that run after a rebuild and are compared."""
CUTS = range(1, UNITS - NEXT + 1)
MAX_ROUNDING = 0.01
"""Limit of the difference of a sample, by which the vocoder's rounding can change it."""


@pytest.fixture(scope="module")
def _model(speaking_checkpoint: Path) -> DuplexModel:
    """Return a model in which each slot has pages between those of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "PAGE_ROWS", 16)
        model = DuplexModel.load(
            speaking_checkpoint, slot_count=4, context_capacity=1900, turn_rows=200
        )
    for cache in caches(model):
        mix_pages(cache)
    return model


@pytest.fixture
def model(_model: DuplexModel) -> Iterator[DuplexModel]:
    yield _model
    for slot in range(4):
        _model.close(slot)


@pytest.fixture
def separate_vocoder(model: DuplexModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the vocoder compute one conversation after the other."""
    vocoder = model.parts.vocoder
    assert vocoder
    encode, decode_mel = vocoder.encode, vocoder.decode_mel

    def encode_each(chunks: Sequence[Any]) -> list[Any]:
        return [encode([chunk])[0] for chunk in chunks]

    def decode_each(chunks: Sequence[Any], mels: Sequence[Any]) -> list[Any]:
        return [decode_mel([one], [mel])[0] for one, mel in zip(chunks, mels, strict=True)]

    monkeypatch.setattr(vocoder, "encode", encode_each)
    monkeypatch.setattr(vocoder, "decode_mel", decode_each)


Ran = list[list[RanUnit]]  # of each talker


def run(model: DuplexModel, slots: Sequence[int], numbers: range) -> Ran:
    """Run units of all talkers, each talker in its slot, in one batch for each number."""
    ran: Ran = [[] for _ in slots]
    for number in numbers:
        units: list[Unit] = []
        for talker, slot in enumerate(slots):
            start = (number + SHIFT * talker) % 40 * SAMPLES
            audio = TALK[start : start + SAMPLES]
            units.append(Unit(slot, audio, number % 9 == 8, sequence=number))
        results: dict[int, UnitOutput] = {}
        for result in model.step(units):
            assert isinstance(result, UnitOutput), result
            results[result.slot] = result
        assert not model.settle(slots)
        for outputs, unit in zip(ran, units, strict=True):
            outputs.append(RanUnit(**vars(results[unit.slot]), unit=unit))
    return ran


def live(model: DuplexModel) -> Ran:
    """Run the talkers without a rebuild."""
    slots = range(len(TALKERS))
    for slot, options in enumerate(TALKERS):
        model.open(slot, options)
    lived = run(model, slots, range(UNITS))
    for slot in slots:
        model.close(slot)
    both_speak = sum(not any(one.is_listen for one in pair) for pair in zip(*lived, strict=True))
    assert both_speak > UNITS / 2
    return lived


def after(model: DuplexModel, lived: Ran, cut: int) -> Ran:
    """Rebuild both conversations after `cut` units, and run the next units."""
    slots = (2, 3)
    for slot, options, outputs in zip(slots, TALKERS, lived, strict=True):
        model.open(slot, options)
        rebuild(model, slot, past_units(slot, outputs[:cut]))
    followed = run(model, slots, range(cut, cut + NEXT))
    for slot in slots:
        model.close(slot)
    return followed


@pytest.mark.usefixtures("separate_vocoder")
def test_samples_are_the_same_if_the_vocoder_rounds_the_same(model: DuplexModel) -> None:
    lived = live(model)
    for cut in CUTS:
        for got, want in zip(after(model, lived, cut), lived, strict=True):
            assert_same_units(got, want[cut : cut + NEXT])


def test_samples_of_a_batch_differ_only_by_rounding(model: DuplexModel) -> None:
    lived = live(model)
    differences: list[float] = []
    for cut in CUTS[::5]:
        for got, want in zip(after(model, lived, cut), lived, strict=True):
            for ours, theirs in zip(got, want[cut : cut + NEXT], strict=True):
                assert_same_units([replace(ours, audio=theirs.audio)], [theirs])
                differences.append(float(np.abs(ours.audio - theirs.audio).max(initial=0.0)))
    assert max(differences) < MAX_ROUNDING
