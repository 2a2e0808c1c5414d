"""Long conversations in a bounded context."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    OptionError,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)

UNIT = 16_000
UNITS = 400
"""Enough units that every row of the cache is written and moved many times."""
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 30 * UNIT)
BASIC = ConversationOptions(
    generate_audio=False,
    decode_mode=DecodeMode.GREEDY,
    force_listen_count=0,
    seed=0,
    sliding_window_mode=WindowMode.BASIC,
    basic_window_high_tokens=230,
    basic_window_low_tokens=160,
)
CONTEXT = replace(
    BASIC,
    sliding_window_mode=WindowMode.CONTEXT,
    context_max_units=6,
    context_previous_max_tokens=30,
)


def units(slots: Sequence[int], number: int, *, force_listen: bool = False) -> list[Unit]:
    start = number % 30 * UNIT
    return [Unit(slot, TALK[start : start + UNIT], force_listen) for slot in slots]


def run(model: DuplexModel, batch: Sequence[Unit]) -> list[UnitOutput]:
    results = list(model.step(batch))
    model.settle([unit.slot for unit in batch])
    found = [result for result in results if isinstance(result, UnitOutput)]
    assert len(found) == len(batch), results
    return sorted(found, key=lambda output: output.slot)


def test_a_long_session_stays_in_a_bounded_context(model: DuplexModel) -> None:
    slots = range(3)
    for slot, options in zip(slots, (BASIC, CONTEXT, CONTEXT), strict=True):
        model.open(slot, options)
    highest = [0] * 3
    for number in range(UNITS):
        # Every fifth unit may speak, so that the context window has words to keep.
        batch = units(slots, number, force_listen=number % 5 > 0)
        for output in run(model, batch):
            highest[output.slot] = max(highest[output.slot], model.context_length(output.slot))
            window = model.conversations[output.slot].window
            assert window.length == model.context_length(output.slot)
    assert 160 < highest[0] <= 230
    assert max(highest[1:]) < 300
    assert model.conversations[1].window.previous
    assert model.conversations[1].window.previous == model.conversations[2].window.previous
    for slot in slots:
        model.close(slot)
        assert model.is_clean(slot)


def test_a_window_moves_for_one_conversation_and_no_other(model: DuplexModel) -> None:
    model.open(0, BASIC)
    model.open(1, replace(BASIC, sliding_window_mode=WindowMode.OFF))
    model.open(2, CONTEXT)
    together = [run(model, units(range(3), number)) for number in range(20)]
    rows_together = [[part.clone() for part in model.llm.cache.read(slot)] for slot in range(3)]
    for slot, options in enumerate((BASIC, replace(BASIC, sliding_window_mode=None), CONTEXT)):
        model.close(slot)
        model.open(slot, options)
        alone = [run(model, units([slot], number))[0] for number in range(20)]
        assert [o.token_ids for o in alone] == [batch[slot].token_ids for batch in together]
        assert [o.context_length for o in alone] == [b[slot].context_length for b in together]
        for ours, theirs in zip(model.llm.cache.read(slot), rows_together[slot], strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_a_context_that_is_smaller_than_the_marks_moves_before_it_is_full(
    model: DuplexModel,
) -> None:
    model.open(0, replace(BASIC, basic_window_high_tokens=4000, basic_window_low_tokens=3500))
    lengths = [run(model, units([0], number))[0].context_length for number in range(80)]
    assert max(lengths) <= model.llm.cache.capacity
    assert lengths[-1] > model.context_capacity // 2


def test_words_that_are_kept_never_fill_a_small_context(model: DuplexModel) -> None:
    talkative = replace(CONTEXT, context_previous_max_tokens=None, context_max_units=24)
    model.open(0, talkative)
    for number in range(80):
        run(model, units([0], number))
    window = model.conversations[0].window
    assert len(window.previous) > 128, "there was enough to say"
    assert window.preserved_rows < model.context_capacity // 2


def test_without_a_window_the_context_fills(model: DuplexModel) -> None:
    model.open(0, replace(BASIC, sliding_window_mode=WindowMode.OFF))
    results = [result for n in range(60) for result in model.step(units([0], n))]
    assert isinstance(results[-1], UnitFailure)
    assert results[-1].reason == "CONTEXT_FULL"


def test_marks_that_contradict_each_other_leave_the_slot_clean(model: DuplexModel) -> None:
    with pytest.raises(OptionError, match="basic_window_low_tokens"):
        model.open(0, replace(BASIC, basic_window_low_tokens=231))
    assert model.is_clean(0)
