"""Conversations whose slots reserve only a part of the memory of a context, and borrow the rest."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.model.kept_units import given_back, kept
from support.model.past_units import (
    RanUnit,
    assert_same_units,
    past_units,
    rebuild,
    run_unit,
)
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.chat import (
    ChatMessage,
    ChatOptions,
    ChatOutput,
    ChatRequest,
    ChatRole,
    Finish,
)
from duplane.worker.models.minicpm_o.duplex.rebuild import REFUSED
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * UNIT)
PICTURE = (GOLDEN / "images" / "sq.png").read_bytes()
FIXED = ConversationOptions(seed=5, force_listen_count=0, temperature=0.9)
BASIC = replace(
    FIXED,
    sliding_window_mode=WindowMode.BASIC,
    basic_window_high_tokens=400,
    basic_window_low_tokens=300,
)
CONTEXT = replace(
    FIXED,
    sliding_window_mode=WindowMode.CONTEXT,
    context_max_units=20,
    context_previous_max_tokens=30,
)
UNITS = 24
OTHER = 1


def unit(slot: int, number: int, frames: tuple[bytes, ...] = ()) -> Unit:
    return Unit(slot, TALK[number % 40 * UNIT :][:UNIT], False, frames, sequence=number)


def lend_all_but(model: DuplexModel, rows: int) -> None:
    """Let another slot hold the pages that are spare, except those of `rows` rows."""
    cache = model.llm.cache
    cache.reset(OTHER)
    kept = rows // cache.pages.page_rows
    cache.hold(OTHER, max(0, cache.room(OTHER) - kept * cache.pages.page_rows))


def live(model: DuplexModel, options: ConversationOptions, draw: random.Random) -> list[RanUnit]:
    """Run units in slot 0 while another slot borrows and gives back. Return those that ran."""
    model.open(0, options)
    ran: list[RanUnit] = []
    for number in range(UNITS):
        lend_all_but(model, draw.choice([0, 32, 400]))
        frames = (PICTURE, PICTURE) if draw.random() < 0.2 else ()
        (result,) = model.step([unit(0, number, frames)])
        if isinstance(result, UnitFailure):
            assert (result.reason, result.is_fatal) == ("CONTEXT_FULL", False)
            continue
        assert isinstance(result, UnitOutput)
        assert not model.settle([0])
        ran.append(RanUnit(**vars(result), unit=unit(0, number, frames)))
    model.llm.cache.reset(OTHER)
    return ran


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("options", [BASIC, CONTEXT], ids=["basic", "context"])
def test_a_window_that_moved_for_lack_of_memory_moves_again_in_a_rebuild(
    lending: DuplexModel, model: DuplexModel, options: ConversationOptions, seed: int
) -> None:
    ran = live(lending, options, random.Random(seed))
    assert any(output.change and output.change.row_limit for output in ran)
    assert len(ran) < UNITS or options is BASIC, "units were refused after the window had moved"
    model.open(0, options)
    rebuild(model, 0, past_units(0, ran))
    theirs = lending.conversations[0].window
    model.open(2, options)
    latest = given_back(2, kept(ran, begin=theirs.units[0].number), ran)
    assert latest[0].unfed_rows
    rebuild(model, 2, latest)
    for ours in (model.conversations[slot].window for slot in (0, 2)):
        assert [each.number for each in ours.units] == [each.number for each in theirs.units]
        assert (ours.previous, ours.length) == (theirs.previous, theirs.length)
    for got, want in zip(model.llm.cache.read(0), lending.llm.cache.read(0), strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
    following = range(30, 34)
    assert_same_units(
        [run_unit(model, unit(0, number)) for number in following],
        [run_unit(lending, unit(0, number)) for number in following],
    )


def alone(model: DuplexModel, count: int) -> list[RanUnit]:
    model.open(0, FIXED)
    return [run_unit(model, unit(0, number)) for number in range(count)]


def test_a_unit_that_finds_no_memory_loses_nothing(
    lending: DuplexModel, model: DuplexModel
) -> None:
    """Of two units that want the last pages in one launch, that of the first slot gets them."""
    want = alone(model, 15)
    for slot in (0, 2):
        lending.open(slot, FIXED)
        assert_same_units(
            [run_unit(lending, unit(slot, number)) for number in range(14)], want[:14]
        )
    results: dict[int, UnitOutput | UnitFailure] = {}
    spare = 0
    for spare in range(4):
        lend_all_but(lending, 16 * spare)
        results = {each.slot: each for each in lending.step([unit(0, 14), unit(2, 14)])}
        refused = [each.reason for each in results.values() if isinstance(each, UnitFailure)]
        assert set(refused) == {"CONTEXT_FULL"}
        if isinstance(results[0], UnitOutput):
            break
    assert spare > 0
    assert isinstance(results[0], UnitOutput)
    lending.llm.cache.reset(OTHER)
    assert_same_units([results[0], run_unit(lending, unit(2, 14))], [want[14]] * 2)


def test_a_rebuild_without_memory_is_refused(lending: DuplexModel, model: DuplexModel) -> None:
    ran = alone(model, 16)
    lending.open(0, FIXED)
    lend_all_but(lending, 0)
    units = past_units(0, ran)
    while True:
        result = lending.rebuild(0, units)
        if isinstance(result, UnitFailure):
            break
        units = units[result.unit_count :]
    assert (result.reason, result.is_fatal) == (REFUSED, True)


def test_a_prompt_without_memory_is_refused_and_leaves_the_slot_clean(
    lending: DuplexModel,
) -> None:
    lend_all_but(lending, 0)
    options = replace(FIXED, system_prompt="a " * 200)
    result = lending.begin(0, lending.preparer.conversation(options))
    assert isinstance(result, UnitFailure)
    assert (result.reason, result.is_fatal) == ("CONTEXT_FULL", True)
    assert lending.is_clean(0)
    lending.llm.cache.reset(OTHER)
    lending.open(0, options)


def chat(model: DuplexModel) -> list[ChatOutput]:
    options = ChatOptions(seed=4, temperature=1.1, max_new_tokens=60)
    request = ChatRequest((ChatMessage(ChatRole.USER, ("Go on. " * 35,)),), options)
    first = model.open_chat(0, model.preparer.chat(request))
    outputs = [first] if isinstance(first, ChatOutput) else []
    while not (outputs and outputs[-1].finish):
        for result in model.chat_step([0]):
            assert isinstance(result, ChatOutput), result
            outputs.append(result)
    model.close(0)
    return outputs


def test_a_chat_without_memory_ends_as_in_a_full_context(
    lending: DuplexModel, model: DuplexModel
) -> None:
    want = [token for output in chat(model) for token in output.token_ids]
    lend_all_but(lending, 16)
    outputs = chat(lending)
    said = [token for output in outputs for token in output.token_ids]
    assert outputs[-1].finish is Finish.CONTEXT_FULL
    assert 0 < len(said) < len(want)
    assert said == want[: len(said)]
    lend_all_but(lending, 0)
    (only,) = chat(lending)
    assert (only.finish, only.token_ids) == (Finish.CONTEXT_FULL, ())
