"""A conversation with a context window is rebuilt exactly from its latest units."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.model.kept_units import given_back, kept
from support.model.past_units import RanUnit, assert_same_units, past_units, rebuild, run_unit
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.audio.encoder import AudioEncoder
from duplane.worker.models.minicpm_o.duplex.conversation import RunningUnit
from duplane.worker.models.minicpm_o.duplex.hearing import Hearing
from duplane.worker.models.minicpm_o.duplex.speech import SpeechStage
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    PastUnit,
    Rebuilt,
    Unit,
    WindowMode,
)

SAMPLES = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * SAMPLES)
PICTURE = (GOLDEN / "images" / "sq.png").read_bytes()
NEXT = 6
"""Number of units that run after a rebuild and are compared."""
ROUNDING = 1e-5
"""Largest difference of two states that differ by rounding, relative to the largest number."""
OPTIONS = ConversationOptions(
    "Streaming Omni Conversation.", seed=11, force_listen_count=1, temperature=1.2, top_p=0.95
)


@dataclass(frozen=True)
class Script:
    """A conversation that is rebuilt after each number of units in `cuts`.

    Its units have a picture from the unit `pictures_from` on.
    """

    options: ConversationOptions
    cuts: tuple[int, ...]
    forced_every: int = 9
    pictures_from: int = 1_000

    def unit(self, slot: int, number: int) -> Unit:
        start = number % 40 * SAMPLES
        is_forced = number % self.forced_every == self.forced_every - 1
        frames = (PICTURE,) if number >= self.pictures_from else ()
        return Unit(slot, TALK[start : start + SAMPLES], is_forced, frames, sequence=number)


SCRIPTS = {
    "basic": Script(
        replace(
            OPTIONS,
            sliding_window_mode=WindowMode.BASIC,
            basic_window_high_tokens=200,
            basic_window_low_tokens=140,
        ),
        (31, 78),
    ),
    "context": Script(
        replace(
            OPTIONS,
            sliding_window_mode=WindowMode.CONTEXT,
            context_max_units=5,
            context_previous_max_tokens=30,
        ),
        (76, 80),
        forced_every=4,
    ),
    "pictures": Script(
        replace(
            OPTIONS,
            sliding_window_mode=WindowMode.BASIC,
            basic_window_high_tokens=430,
            basic_window_low_tokens=260,
            generate_audio=False,
        ),
        (79,),
        pictures_from=66,
    ),
}


@pytest.fixture(scope="module")
def _model(speaking_checkpoint: Path) -> DuplexModel:
    # `turn_rows` is small, so a few units of speech already make the talker drop its older rows.
    return DuplexModel.load(speaking_checkpoint, slot_count=3, context_capacity=700, turn_rows=200)


@pytest.fixture
def model(_model: DuplexModel) -> Iterator[DuplexModel]:
    yield _model
    for slot in range(3):
        _model.close(slot)


Lived = Callable[[str], list[RanUnit]]


@pytest.fixture(scope="module")
def lived(_model: DuplexModel) -> Lived:
    """Return the outputs of a script that was run without a rebuild."""

    @cache
    def live(name: str) -> list[RanUnit]:
        script = SCRIPTS[name]
        _model.open(2, script.options)
        count = script.cuts[-1] + NEXT
        outputs = [run_unit(_model, script.unit(2, number)) for number in range(count)]
        _model.close(2)
        return outputs

    return live


def difference(model: DuplexModel) -> float:
    """Return the largest relative difference between the contexts of the slots 0 and 1."""
    largest = 0.0
    for ours, theirs in zip(*(model.llm.cache.read(slot) for slot in (0, 1)), strict=True):
        assert ours.shape == theirs.shape
        largest = max(largest, float((ours - theirs).abs().max() / theirs.abs().max()))
    return largest


def rebuild_both(
    model: DuplexModel, name: str, past: list[PastUnit], outputs: list[RanUnit]
) -> None:
    """Rebuild a conversation in slot 0 from `past`, and in slot 1 from all of its units."""
    for slot, units in ((0, past), (1, past_units(1, outputs))):
        model.open(slot, SCRIPTS[name].options)
        shares = rebuild(model, slot, units)
        assert not shares[-1].lack


def go_on(model: DuplexModel, name: str, cut: int) -> list[RanUnit]:
    return [run_unit(model, SCRIPTS[name].unit(0, number)) for number in range(cut, cut + NEXT)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut"), [(name, cut) for name, script in SCRIPTS.items() for cut in script.cuts]
)
def test_a_rebuild_that_feeds_the_latest_units_is_exact(
    model: DuplexModel, lived: Lived, name: str, cut: int
) -> None:
    outputs = lived(name)
    units = kept(outputs[:cut], windows=1)  # two layers: one context more is exact
    assert (units.heard_from > 0) is (cut > 70)
    assert units.heard_from < units.fed_from
    rebuild_both(model, name, given_back(0, units, outputs[:cut]), outputs[:cut])
    assert difference(model) < ROUNDING
    following = go_on(model, name, cut)
    assert_same_units(following, outputs[cut : cut + NEXT])
    reaches = [output.reach for output in outputs[cut : cut + NEXT]]
    assert [output.reach for output in following] == reaches


@pytest.mark.slow
def test_a_rebuild_without_a_context_more_is_not_exact(model: DuplexModel, lived: Lived) -> None:
    cut = 78
    outputs = lived("basic")[:cut]
    begin = cut - outputs[-1].reach.context_units if outputs[-1].reach else 0
    past = given_back(0, kept(outputs, begin), outputs)
    rebuild_both(model, "basic", past, outputs)
    assert difference(model) > 100 * ROUNDING


NO_SOUND = np.zeros(0, np.float32)


def silent(past: PastUnit) -> PastUnit:
    return replace(past, unit=replace(past.unit, audio=NO_SOUND))


def silent_until(past: list[PastUnit], end: int) -> list[PastUnit]:
    return [silent(unit) for unit in past[:end]] + past[end:]


def first_heard(past: list[PastUnit]) -> int:
    return next(number for number, unit in enumerate(past) if unit.unit.audio.size)


def first_fed(past: list[PastUnit]) -> int:
    return next(number for number, unit in enumerate(past) if not unit.unfed_rows)


def unfed(past: PastUnit, rows: int) -> PastUnit:
    return replace(past, unfed_rows=rows)


def without_pictures_rule(past: list[PastUnit]) -> list[PastUnit]:
    return [replace(past[0], unit=replace(past[0].unit, frames=(PICTURE,))), *past[1:]]


def with_one(past: list[PastUnit], number: int, changed: PastUnit) -> list[PastUnit]:
    return [*past[:number], changed, *past[number + 1 :]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message", "field"),
    [
        (lambda past: silent_until(past, first_fed(past)), "the sound before it", "audio"),
        (lambda past: silent_until(past, first_heard(past) + 1), "cannot begin at", "audio"),
        (lambda past: silent_until(past, first_heard(past) + 10), "the sound before it", "audio"),
        (lambda past: with_one(past, 50, silent(past[50])), "the sound is missing", "audio"),
        (lambda past: with_one(past, 3, unfed(past[3], 0)), "the sound before it", "audio"),
        (lambda past: with_one(past, 3, unfed(past[3], 3)), "cannot have 3 rows", "row_count"),
        (lambda past: with_one(past, 3, unfed(past[3], 9**9)), "cannot have", "row_count"),
        (lambda past: with_one(past, 3, unfed(past[3], 30)), "the context has", ""),
        (lambda past: with_one(past, 76, unfed(past[76], 13)), "before it was fed", "row_count"),
        (without_pictures_rule, "has pictures", "row_count"),
    ],
)
def test_units_that_lack_something_are_refused(
    model: DuplexModel,
    lived: Lived,
    change: Callable[[list[PastUnit]], list[PastUnit]],
    message: str,
    field: str,
) -> None:
    outputs = lived("basic")[:78]
    past = change(given_back(0, kept(outputs, windows=1), outputs))
    model.open(0, SCRIPTS["basic"].options)
    while isinstance(result := model.rebuild(0, past), Rebuilt):
        assert not result.is_complete
        past = past[result.unit_count :]
    assert message in result.message
    assert (result.field, result.is_fatal) == (field, True)


@pytest.mark.slow
def test_a_context_with_units_that_were_not_fed_is_not_complete(
    model: DuplexModel, lived: Lived
) -> None:
    outputs = lived("basic")[:78]
    model.open(0, SCRIPTS["basic"].options)
    late = kept(outputs, 76)
    assert rebuild(model, 0, given_back(0, late, outputs))[-1].lack.startswith("units that were")


def hears_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hearing, "is_ready", True)


def has_another_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AudioEncoder, "period_units", 30)


def notes(monkeypatch: pytest.MonkeyPatch, *, forgets_unfed: bool, fed_from: int) -> None:
    """Let the rebuild take only the speech of units from `fed_from` on to the talker."""
    note = SpeechStage.note

    def changed(self: SpeechStage, unit: RunningUnit, number: int, *, is_fed: bool = True) -> None:
        if is_fed or not forgets_unfed:
            note(self, unit, number, is_fed=is_fed and number >= fed_from)

    monkeypatch.setattr(SpeechStage, "note", changed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cold sound", "wrong period"])
def test_sound_that_is_encoded_differently_changes_the_context(
    model: DuplexModel, lived: Lived, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    outputs = lived("basic")[:78]
    past = given_back(0, kept(outputs, windows=1), outputs)
    model.open(1, SCRIPTS["basic"].options)
    rebuild(model, 1, past_units(1, outputs))
    if fault == "cold sound":
        hears_anything(monkeypatch)
        past = silent_until(past, first_fed(past) // 10 * 10)
    else:
        hears_anything(monkeypatch)
        has_another_period(monkeypatch)
    model.open(0, SCRIPTS["basic"].options)
    rebuild(model, 0, past)
    assert difference(model) > 100 * ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["speech of units that are not fed", "begin of the turn"])
def test_speech_that_is_not_noted_changes_the_next_units(
    model: DuplexModel, lived: Lived, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    cut = 76
    outputs = lived("context")
    past = given_back(0, kept(outputs[:cut], windows=1), outputs[:cut])
    if fault == "begin of the turn":
        notes(monkeypatch, forgets_unfed=False, fed_from=cut - 1)
    else:
        notes(monkeypatch, forgets_unfed=True, fed_from=0)
    rebuild_both(model, "context", past, outputs[:cut])
    assert difference(model) < ROUNDING  # the context does not show it
    with pytest.raises(AssertionError):
        assert_same_units(go_on(model, "context", cut), outputs[cut : cut + NEXT])
