"""Turns end while the prompts of their voices are not cached, since too many voices are in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.model.past_units import RanUnit, past_units, rebuild, run_unit
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.interface import Continue, Part, Ready, Unfinished
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder
from duplane.worker.models.types import ConversationOptions, Opened, Unit, UnitOutput

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * UNIT)
SLOTS = (0, 1, 2)
UNITS, INTERRUPTED = 8, 4


class Evictions:
    """Evicts all voices of a model, and records whose prompts are computed."""

    def __init__(self, model: DuplexModel, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(model.parts.vocoder, Vocoder)
        self._vocoder = model.parts.vocoder
        self.prompts: list[bytes] = []
        compute = self._vocoder._condition

        def condition(index: int, voice: Any, *arguments: Any, **options: Any) -> Any:
            self.prompts.append(voice.digest())
            return compute(index, voice, *arguments, **options)

        monkeypatch.setattr(self._vocoder, "_condition", condition)

    def evict(self) -> None:
        entries = self._vocoder._entries
        while entries:
            self._vocoder._free_entries.append(entries.popitem()[1])
        self.prompts.clear()


def unit(slot: int, number: int) -> Unit:
    audio = TALK[(3 * slot + number) * UNIT :][:UNIT]
    return Unit(slot, audio, force_listen=number == INTERRUPTED)


def step(model: DuplexModel, slots: Sequence[int], number: int) -> list[UnitOutput]:
    results = list(model.step([unit(slot, number) for slot in slots]))
    assert not model.settle(slots)
    outputs = [result for result in results if isinstance(result, UnitOutput)]
    assert len(outputs) == len(slots)
    return sorted(outputs, key=lambda output: output.slot)


def open_all(model: DuplexModel) -> None:
    for slot in SLOTS:
        model.open(slot, ConversationOptions(seed=slot, force_listen_count=0))


@pytest.fixture
def expected(model: DuplexModel) -> list[UnitOutput]:
    """Return the outputs of the conversations while their voices stay cached."""
    open_all(model)
    outputs: list[UnitOutput] = []
    for number in range(UNITS):
        outputs += step(model, SLOTS, number)
        assert not any(map(model.awaits_voice, SLOTS))
    for slot in SLOTS:
        model.close(slot)
    return outputs


@pytest.mark.parametrize("is_started", [True, False])
def test_the_end_of_a_turn_computes_no_prompt_and_the_next_turn_sounds_the_same(
    model: DuplexModel,
    expected: list[UnitOutput],
    monkeypatch: pytest.MonkeyPatch,
    is_started: bool,
) -> None:
    """If the caller does not start the next turn, the first unit that speaks starts it."""
    evictions = Evictions(model, monkeypatch)
    open_all(model)
    outputs: list[UnitOutput] = []
    waits: list[set[int]] = []
    for number in range(UNITS):
        evictions.evict()
        outputs += step(model, SLOTS, number)
        waiting = {slot for slot in SLOTS if model.awaits_voice(slot)}
        waits.append(waiting)
        if not is_started:
            continue
        assert not evictions.prompts
        for slot in waiting:
            evictions.evict()
            assert list(model.launch([Continue(slot, Part.VOICE, 1)])) == [Ready(slot)]
            assert len(evictions.prompts) == 1
            assert not model.awaits_voice(slot)
    assert waits[INTERRUPTED], "no turn was interrupted"
    assert any(output.end_of_turn for output in outputs)
    for got, want in zip(outputs, expected, strict=True):
        assert got.token_ids == want.token_ids
        assert got.change == want.change
        np.testing.assert_array_equal(got.audio, want.audio)
    for slot in SLOTS:
        model.close(slot)
        assert model.is_clean(slot)


def test_an_opening_computes_no_prompt_and_the_first_turn_waits_for_it(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    evictions = Evictions(model, monkeypatch)
    evictions.evict()
    options = ConversationOptions(seed=0, force_listen_count=0)
    first = model.begin(0, model.preparer.conversation(options))
    assert isinstance(first, Unfinished)
    opened, left = model.launch([Continue(0, Part.FEED, first.rows)])
    assert isinstance(opened, Opened)
    assert left == Unfinished(0, Part.VOICE)
    assert not evictions.prompts
    assert list(model.launch([Continue(0, Part.VOICE, 1)])) == [Ready(0)]
    assert len(evictions.prompts) == 1


def test_a_rebuild_computes_the_prompt_at_most_once_in_a_share(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild continues a conversation that awaits its voice, and leaves none that awaits it."""
    options = ConversationOptions(seed=1, force_listen_count=0)
    outputs: list[RanUnit] = []
    model.open(1, options)
    for number in range(UNITS):
        outputs.append(run_unit(model, unit(1, number)))
    evictions = Evictions(model, monkeypatch)
    model.open(0, options)
    cut = INTERRUPTED + 1
    for number in range(cut):
        evictions.evict()
        assert run_unit(model, replace(unit(1, number), slot=0)).change == outputs[number].change
    assert model.awaits_voice(0)
    evictions.evict()
    shares = rebuild(model, 0, past_units(0, outputs[cut:]))
    assert len(evictions.prompts) == 1 <= len(shares)
    assert not model.awaits_voice(0)
    after = [unit(1, UNITS + number).audio for number in range(3)]
    for audio in after:
        ours, theirs = (run_unit(model, Unit(slot, audio)) for slot in (0, 1))
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_array_equal(ours.audio, theirs.audio)
