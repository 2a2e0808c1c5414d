"""A conversation that is rebuilt from its past units continues exactly like the original."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.model.past_units import RanUnit, assert_same_units, past_units, rebuild, run_unit
from support.paths import GOLDEN

from duplane.tools.bench.host_waits import SyncCount
from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.worker.models.minicpm_o.duplex import rebuild as rebuild_module
from duplane.worker.models.minicpm_o.duplex import rebuild_state, speech
from duplane.worker.models.minicpm_o.loader import CLOSING_ROWS
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    PastUnit,
    Rebuilt,
    Unit,
    UnitFailure,
    WindowMode,
)

SAMPLES = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * SAMPLES)
PICTURE = (GOLDEN / "images" / "sq.png").read_bytes()
VOICE = read_clip(GOLDEN / "audio" / "ref1.wav")
NEXT = 8
"""Number of units that run after a rebuild and are compared."""
SAMPLED = ConversationOptions(
    "Streaming Omni Conversation.", seed=7, force_listen_count=1, temperature=1.2, top_p=0.95
)
WINDOW = replace(SAMPLED, sliding_window_mode=WindowMode.BASIC, seed=11)


@dataclass(frozen=True)
class Script:
    """A conversation of `units` units. It is rebuilt after each number of past units in `cuts`."""

    options: ConversationOptions
    units: int
    cuts: tuple[int, ...]
    forced_every: int = 9
    frames: tuple[bytes, ...] = ()

    def unit(self, slot: int, number: int) -> Unit:
        start = number % 40 * SAMPLES
        is_forced = number % self.forced_every == self.forced_every - 1
        audio = TALK[start : start + SAMPLES]
        return Unit(slot, audio, is_forced, self.frames, sequence=number)


SCRIPTS = {
    # The audio encoder begins a period at unit 29, and the mel drops its first samples there.
    "sampled": Script(SAMPLED, 42, (0, 1, 5, 9, 20, 29, 31, 34)),
    "greedy": Script(replace(SAMPLED, decode_mode=DecodeMode.GREEDY, llm_voice=VOICE), 24, (4, 12)),
    "text": Script(replace(SAMPLED, generate_audio=False), 24, (3, 15)),
    "short units": Script(
        replace(
            SAMPLED,
            max_new_speak_tokens_per_chunk=4,
            text_repetition_window_size=6,
            listen_top_k=3,
            temperature=2.0,
        ),
        24,
        (6, 11),
    ),
    "basic window": Script(
        replace(WINDOW, basic_window_high_tokens=230, basic_window_low_tokens=160), 30, (13, 22)
    ),
    "context window": Script(
        replace(
            WINDOW,
            sliding_window_mode=WindowMode.CONTEXT,
            context_max_units=6,
            context_previous_max_tokens=30,
        ),
        30,
        (7, 22),
        forced_every=4,
    ),
    "full context": Script(WINDOW, 36, (28,), frames=(PICTURE,)),
    "frames": Script(SAMPLED, 16, (3, 8), frames=(PICTURE,)),
}


@pytest.fixture(scope="module")
def _model(speaking_checkpoint: Path) -> DuplexModel:
    # `turn_rows` is small, so a few units of speech already make the talker drop its older rows.
    return DuplexModel.load(speaking_checkpoint, slot_count=3, context_capacity=1900, turn_rows=200)


@pytest.fixture
def model(_model: DuplexModel) -> Iterator[DuplexModel]:
    yield _model
    for slot in range(3):
        _model.close(slot)


@pytest.fixture(scope="module")
def lived(_model: DuplexModel) -> Callable[[str], list[RanUnit]]:
    """Return the outputs of a script that was run without a rebuild."""

    @cache
    def live(name: str) -> list[RanUnit]:
        script = SCRIPTS[name]
        _model.open(2, script.options)
        outputs = [run_unit(_model, script.unit(2, number)) for number in range(script.units)]
        _model.close(2)
        return outputs

    return live


Lived = Callable[[str], list[RanUnit]]


def go_on(model: DuplexModel, name: str, cut: int, count: int = NEXT) -> list[RanUnit]:
    script = SCRIPTS[name]
    return [run_unit(model, script.unit(0, number)) for number in range(cut, cut + count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut"), [(name, cut) for name, script in SCRIPTS.items() for cut in script.cuts]
)
def test_the_next_units_are_the_same(model: DuplexModel, lived: Lived, name: str, cut: int) -> None:
    outputs = lived(name)
    model.open(0, SCRIPTS[name].options)
    rebuild(model, 0, past_units(0, outputs[:cut]))
    assert_same_units(go_on(model, name, cut), outputs[cut : cut + NEXT])


def test_the_script_has_what_a_rebuild_can_get_wrong(lived: Lived) -> None:
    outputs = lived("sampled")
    changes = [rebuild_state.decode(output.state) for output in outputs]
    assert changes == [output.change for output in outputs]
    assert any(change.interrupted_turn for change in changes)
    assert any(output.end_of_turn for output in outputs)
    replaced_or_dropped = [
        output
        for output, change in zip(outputs, changes, strict=True)
        if not {*change.chosen_token_ids} <= {*output.token_ids}
    ]
    assert replaced_or_dropped
    draw_counts = {
        change.draw_count - 2 * len(output.token_ids)
        for output, change in zip(outputs, changes, strict=True)
        if output.audio_token_count == 25
    }
    assert len(draw_counts) > 1


@pytest.mark.slow
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(splits=st.sets(st.integers(1, 11), max_size=4))
def test_any_split_of_the_past_gives_the_same(
    model: DuplexModel, lived: Lived, splits: set[int]
) -> None:
    outputs = lived("sampled")
    past = past_units(0, outputs[:12])
    model.close(0)
    model.open(0, SAMPLED)
    for begin, end in pairwise([0, *sorted(splits), 12]):
        rebuild(model, 0, past[begin:end])
    assert_same_units(go_on(model, "sampled", 12, 2), outputs[12:14])


def of_former_release(past: PastUnit) -> PastUnit:
    """Return the past unit as an edge of release 0.1 sends it."""
    return replace(past, state=b"", change=rebuild_state.decode(past.state))


def test_units_of_the_former_release_are_rebuilt(model: DuplexModel, lived: Lived) -> None:
    outputs = lived("sampled")
    model.open(0, SAMPLED)
    rebuild(model, 0, [of_former_release(past) for past in past_units(0, outputs[:6])])
    assert_same_units(go_on(model, "sampled", 6, 2), outputs[6:8])


@pytest.mark.parametrize("state", [b"", b"\x01", b"\xff", b"a state of another family"])
def test_a_broken_state_is_refused(model: DuplexModel, lived: Lived, state: bytes) -> None:
    past = past_units(0, lived("sampled")[:2])
    past[1] = replace(past[1], state=state)
    model.open(0, SAMPLED)
    failure = model.rebuild(0, past)
    assert isinstance(failure, UnitFailure)
    assert (failure.reason, failure.field) == ("REBUILD_REFUSED", "rebuild_state")
    assert "past unit 1" in failure.message


def without_sound(past: PastUnit) -> PastUnit:
    return replace(past, unit=replace(past.unit, audio=np.zeros(SAMPLES, np.float32)))


def without(past: PastUnit, **fields: Any) -> PastUnit:
    change = replace(rebuild_state.decode(past.state), **fields)
    return replace(past, state=rebuild_state.encode(change))


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [without_sound, partial(without, draw_count=0), partial(without, speech_token_ids=())],
)
def test_a_past_that_lacks_something_goes_on_differently(
    model: DuplexModel, lived: Lived, broken: Callable[[PastUnit], PastUnit]
) -> None:
    outputs = lived("sampled")
    model.open(0, SAMPLED)
    rebuild(model, 0, [broken(past) for past in past_units(0, outputs[:6])])
    with pytest.raises(AssertionError):
        assert_same_units(go_on(model, "sampled", 6, 2), outputs[6:8])


def without_hidden_choices(past: PastUnit) -> PastUnit:
    """Leave out the choices that the unit's ids do not show: replaced ids and dropped words."""
    chosen = rebuild_state.decode(past.state).chosen_token_ids
    return without(past, chosen_token_ids=tuple(id_ for id_ in chosen if id_ in past.token_ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [without_hidden_choices, partial(without, interrupted_turn=False)]
)
def test_a_past_without_what_the_ids_do_not_show_is_refused(
    model: DuplexModel, lived: Lived, broken: Callable[[PastUnit], PastUnit]
) -> None:
    past = [broken(unit) for unit in past_units(0, lived("sampled")[:12])]
    model.open(0, SAMPLED)
    while isinstance(result := model.rebuild(0, past), Rebuilt):
        assert not result.is_complete
        past = past[result.unit_count :]
    assert (result.reason, result.field) == ("REBUILD_REFUSED", "token_ids")


@pytest.mark.parametrize(
    ("changed", "reason", "field"),
    [
        ({"token_ids": ()}, "REBUILD_REFUSED", "token_ids"),
        ({"token_ids": (-1,)}, "REBUILD_REFUSED", "token_ids"),
        ({"token_ids": (5,) * 100}, "REBUILD_REFUSED", "token_ids"),
        ({"context_length": 7}, "REBUILD_DIFFERS", ""),
        ({"chosen_token_ids": ()}, "REBUILD_REFUSED", "token_ids"),
        ({"chosen_token_ids": (1 << 20,)}, "REBUILD_REFUSED", "chosen_token_ids"),
        ({"speech_token_ids": (6561,)}, "REBUILD_REFUSED", "speech_token_ids"),
        ({"draw_count": -1}, "REBUILD_REFUSED", "draw_count"),
        ({"interrupted_turn": True}, "REBUILD_REFUSED", "interrupted_turn"),
        ({"frames": (PICTURE,)}, "REBUILD_DIFFERS", ""),
        ({"frames": (b"no picture",)}, "REBUILD_REFUSED", "frames[0]"),
        ({"audio": np.zeros(100, np.float32)}, "REBUILD_REFUSED", "audio"),
    ],
)
def test_a_wrong_past_unit_is_refused(
    model: DuplexModel, lived: Lived, changed: dict[str, Any], reason: str, field: str
) -> None:
    past = [of_former_release(unit) for unit in past_units(0, lived("sampled")[:2])]
    parts: list[tuple[str, Any]] = [("unit", past[1].unit), ("change", past[1].change)]
    own = {name: value for name, value in changed.items() if hasattr(past[1], name)}
    nested = {
        part: replace(value, **{name: changed[name] for name in changed if hasattr(value, name)})
        for part, value in parts
    }
    past[1] = replace(past[1], **nested, **own)
    model.open(0, SAMPLED)
    failure = model.rebuild(0, past)
    assert isinstance(failure, UnitFailure)
    assert (failure.reason, failure.field, failure.is_fatal) == (reason, field, True)
    assert "past unit 1" in failure.message
    with pytest.raises(ValueError, match="lost"):
        list(model.step([SCRIPTS["sampled"].unit(0, 2)]))
    model.close(0)
    assert model.is_clean(0)


@pytest.mark.parametrize("stage", ["llm", "talker", "vocoder"])
def test_a_rebuild_that_raises_leaves_a_slot_that_can_be_cleaned(
    model: DuplexModel, lived: Lived, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    model.open(0, SAMPLED)
    past = past_units(0, lived("sampled")[:3])
    method = "append_long" if stage == "llm" else "repeat"
    monkeypatch.setattr(getattr(model.parts, stage), method, fail)
    results: list[Rebuilt | UnitFailure] = []
    while not (results and isinstance(results[-1], UnitFailure)):
        results.append(model.rebuild(0, past if not results else ()))
    assert results[-1] == UnitFailure(0, "STAGE_FAILED", "the stage 'rebuild' failed", True)
    model.close(0)
    assert model.is_clean(0)


@pytest.mark.slow
def test_a_neighbour_does_not_notice_a_rebuild(model: DuplexModel, lived: Lived) -> None:
    script = SCRIPTS["greedy"]
    past = past_units(1, lived("sampled")[:18])
    model.open(0, script.options)
    alone = [run_unit(model, script.unit(0, number)) for number in range(5)]
    model.close(0)
    model.open(0, script.options)
    model.open(1, SAMPLED)
    beside: list[RanUnit] = []
    for number in range(5):
        beside.append(run_unit(model, script.unit(0, number)))
        result = model.rebuild(1, past)
        assert isinstance(result, Rebuilt)
        past = past[result.unit_count :]
    assert not past
    assert_same_units(beside, alone)


def test_a_rebuild_is_done_in_bounded_shares(model: DuplexModel, lived: Lived) -> None:
    outputs = lived("sampled")
    model.open(0, SAMPLED)
    shares = rebuild(model, 0, past_units(0, outputs[:34]))
    rows = 0
    for share in (share for share in shares if share.unit_count):
        assert 0 < share.context_length - rows <= rebuild_module.CPU_SHARE_ROWS + 100
        rows = share.context_length
    assert sum(share.unit_count for share in shares) == 34
    assert rows == outputs[33].context_length
    with pytest.raises(ValueError, match="slot 1 has no conversation"):
        model.rebuild(1, ())


def test_a_share_on_a_cpu_is_smaller_in_a_long_context(
    monkeypatch: pytest.MonkeyPatch, model: DuplexModel, lived: Lived
) -> None:
    half = 200  # the context at which a share has half as many rows
    monkeypatch.setattr(rebuild_module, "CPU_CONTEXT_ROWS", half)
    rows = model.open(0, SAMPLED).context_length
    past = past_units(0, lived("sampled")[:34])
    for share in rebuild(model, 0, past):
        if share.unit_count > 1:
            most = rebuild_module.CPU_SHARE_ROWS * half // (half + rows)
            assert share.context_length - rows <= most + CLOSING_ROWS
        rows = share.context_length
    assert rows > 2 * half


def test_the_host_waits_only_for_the_samples_of_the_recent_chunks(
    model: DuplexModel, lived: Lived
) -> None:
    model.open(0, SAMPLED)
    with SyncCount() as waits:
        rebuild(model, 0, past_units(0, lived("sampled")[:15]))
    assert waits.count == speech.RECENT_CHUNKS


def test_no_unit_runs_before_the_rebuild_is_complete(model: DuplexModel, lived: Lived) -> None:
    model.open(0, SAMPLED)
    result = model.rebuild(0, past_units(0, lived("sampled")[:5]))
    assert isinstance(result, Rebuilt)
    assert (result.unit_count, result.is_complete) == (5, False)
    with pytest.raises(ValueError, match="not rebuilt"):
        list(model.step([SCRIPTS["sampled"].unit(0, 5)]))


def test_a_very_long_turn_goes_on_with_a_fresh_vocoder(
    model: DuplexModel, lived: Lived, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "TURN_CHUNKS", 2)
    outputs = lived("sampled")
    model.open(0, SAMPLED)
    rebuild(model, 0, past_units(0, outputs[:6]))
    (following,) = go_on(model, "sampled", 6, 1)
    assert following.change == outputs[6].change
    assert following.audio.shape == outputs[6].audio.shape
    assert not np.array_equal(following.audio, outputs[6].audio)
