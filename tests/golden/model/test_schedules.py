"""Each conversation has the same results as alone, whenever others start and end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.model.pages import mixed_pages
from support.paths import GOLDEN
from support.speech import assert_probabilities_equal, assert_sounds_equal

from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 24 * UNIT)
PICTURES = [(GOLDEN / "images" / name).read_bytes() for name in ("sq.png", "wide.png", "big.png")]
VOICE = read_clip(GOLDEN / "audio" / "ref2.wav")
ROWS = 5e-5
"""Largest difference between two float32 runs of the same rows, after many layers and units."""


@dataclass(frozen=True)
class Shown:
    """One unit: its second of the sound, its sample count, its frames and its options."""

    second: int
    samples: int
    frames: tuple[bytes, ...]
    max_slices: int
    force_listen: bool

    def of(self, slot: int) -> Unit:
        start = self.second * UNIT
        audio = TALK[start : start + self.samples]
        return Unit(slot, audio, self.force_listen, self.frames, self.max_slices)


@dataclass(frozen=True)
class Plan:
    """One conversation: its options, its first round, and a unit or a pause for each round."""

    options: ConversationOptions
    joins: int
    units: tuple[Shown | None, ...]

    @property
    def leaves(self) -> int:
        return self.joins + len(self.units)


@dataclass
class Heard:
    """The results of one conversation, and its final keys and values."""

    results: list[UnitOutput | UnitFailure]
    keys: torch.Tensor
    values: torch.Tensor


frames = st.lists(st.sampled_from([*PICTURES, b"no picture"]), max_size=2).map(tuple)
shown = st.builds(
    Shown,
    second=st.integers(0, 22),
    samples=st.sampled_from([UNIT, UNIT, UNIT, UNIT, 20_000, 5_000, 0]),
    frames=st.one_of(st.just(()), st.just(()), frames),
    max_slices=st.sampled_from([1, 1, 4]),
    force_listen=st.integers(0, 4).map(lambda number: number == 0),
)
window = st.sampled_from(
    [
        {},
        {
            "sliding_window_mode": WindowMode.BASIC,
            "basic_window_high_tokens": 150,
            "basic_window_low_tokens": 100,
        },
        {
            "sliding_window_mode": WindowMode.CONTEXT,
            "context_max_units": 2,
            "context_previous_max_tokens": 9,
        },
    ]
)
sampling = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "decode_mode": st.sampled_from(DecodeMode),
        "temperature": st.sampled_from([0.0, 0.7, 2.0]),
        "top_k": st.sampled_from([0, 1, 20]),
        "top_p": st.sampled_from([0.0, 0.5, 0.95]),
        "text_repetition_penalty": st.sampled_from([1.0, 1.05, 3.0]),
        "text_repetition_window_size": st.sampled_from([0, 2, 512]),
        "length_penalty": st.sampled_from([0.5, 1.1]),
        "listen_prob_scale": st.sampled_from([0.5, 1.0]),
        "listen_top_k": st.sampled_from([None, None, 2]),
        "force_listen_count": st.integers(0, 2),
        "max_new_speak_tokens_per_chunk": st.sampled_from([1, 5, 20, 40]),
        "tts_temperature": st.sampled_from([0.0, 0.8]),
        "generate_audio": st.integers(0, 3).map(lambda number: number == 0),
        "llm_voice": st.sampled_from([None, None, VOICE]),
    }
)
plans = st.builds(
    Plan,
    options=st.builds(lambda *parts: ConversationOptions(**parts[0], **parts[1]), sampling, window),
    joins=st.integers(0, 3),
    units=st.lists(st.one_of(st.none(), shown, shown, shown, shown), min_size=1, max_size=7).map(
        tuple
    ),
)
schedules = st.dictionaries(st.integers(0, 3), plans, min_size=2, max_size=4)


def play(model: DuplexModel, schedule: dict[int, Plan]) -> dict[int, Heard]:
    """Run conversations together, each in its slot."""
    heard: dict[int, Heard] = {}
    results: dict[int, list[UnitOutput | UnitFailure]] = {slot: [] for slot in schedule}
    for clock in range(max(plan.leaves for plan in schedule.values()) + 1):
        for slot, plan in schedule.items():
            if clock == plan.leaves:
                rows = model.llm.cache.read(slot)
                heard[slot] = Heard(results[slot], *(part.clone() for part in rows))
                model.close(slot)
                assert model.is_clean(slot)
            elif clock == plan.joins:
                model.open(slot, plan.options)
        units = [unit.of(slot) for slot, unit in _present(schedule, clock)]
        for result in model.step(units):
            results[result.slot].append(result)
        model.settle([unit.slot for unit in units])
    return heard


def _present(schedule: dict[int, Plan], clock: int) -> Iterable[tuple[int, Shown]]:
    for slot, plan in schedule.items():
        number = clock - plan.joins
        unit = plan.units[number] if 0 <= number < len(plan.units) else None
        if unit is not None:
            yield slot, unit


def assert_same(ours: Heard, theirs: Heard) -> None:
    assert len(ours.results) == len(theirs.results)
    for one, other in zip(ours.results, theirs.results, strict=True):
        if isinstance(one, UnitOutput) and isinstance(other, UnitOutput):
            likely = other.listen_probability
            assert_probabilities_equal(one.listen_probability, likely)
            silent = {"audio": np.zeros(0, np.float32), "stage_s": {}, "listen_probability": likely}
            assert replace(one, slot=0, **silent) == replace(other, slot=0, **silent)
            assert_sounds_equal(one.audio, other.audio)
        else:
            assert replace(one, slot=0) == replace(other, slot=0)
    assert ours.keys.shape == theirs.keys.shape
    torch.testing.assert_close(ours.keys, theirs.keys, atol=ROWS, rtol=0)
    torch.testing.assert_close(ours.values, theirs.values, atol=ROWS, rtol=0)


@settings(
    max_examples=15,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schedule=schedules, are_mixed=st.booleans())
def test_each_conversation_gets_what_it_gets_alone(
    model: DuplexModel, schedule: dict[int, Plan], are_mixed: bool
) -> None:
    """If the pages are mixed, each slot has pages between those of others."""
    with mixed_pages(model, are_mixed=are_mixed):
        together = play(model, schedule)
    for slot, plan in schedule.items():
        alone = play(model, {1: replace(plan, joins=0)})
        assert_same(together[slot], alone[1])
