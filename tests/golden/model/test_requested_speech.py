"""Requested texts are spoken as turns of the model, and the context remembers them as its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.model.past_units import RanUnit, assert_same_units, past_units, rebuild, run_unit
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.duplex import rebuild_state
from duplane.worker.models.minicpm_o.duplex.sampling import Choice, Decision, DuplexSampling
from duplane.worker.models.minicpm_o.duplex.unit_state import MAX_UNIT_CHARACTERS
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    MAX_SPEECH_REQUESTS,
    ConversationOptions,
    DecodeMode,
    SpeechOutcome,
    SpeechRequest,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)

SAMPLES = 16_000
SLOTS = 3
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * SAMPLES)
SAMPLED = ConversationOptions(
    "Streaming Omni Conversation.", seed=7, force_listen_count=3, temperature=1.2, top_p=0.95
)
VOICED = replace(SAMPLED, force_listen_count=1000)  # the model itself never speaks
QUIET = replace(VOICED, generate_audio=False)
GREETING, RESULT = "hello there, how can I help you today", "the small boat is near the house"
SPOKEN, INTERRUPTED, REFUSED = SpeechOutcome

Requests = Mapping[int, Sequence[str]]  # unit -> texts


@pytest.fixture(scope="module")
def _model(speaking_checkpoint: Path) -> DuplexModel:
    return DuplexModel.load(speaking_checkpoint, slot_count=SLOTS, context_capacity=1900)


@pytest.fixture
def model(_model: DuplexModel) -> Iterator[DuplexModel]:
    yield _model
    for slot in range(SLOTS):
        _model.close(slot)


def unit_of(
    model: DuplexModel,
    slot: int,
    number: int,
    texts: Sequence[str] = (),
    *,
    is_forced: bool = False,
) -> Unit:
    """Return a prepared unit. Its requests have the numbers 10 * `number`, and so on."""
    start = number % 40 * SAMPLES
    requests = tuple(SpeechRequest(10 * number + at, text) for at, text in enumerate(texts))
    audio = TALK[start : start + SAMPLES]
    unit = Unit(slot, audio, is_forced, sequence=number, speech=requests)
    prepared = model.preparer.unit(unit)
    assert isinstance(prepared, Unit)
    return prepared


def run(
    model: DuplexModel,
    slot: int,
    numbers: range,
    requests: Requests | None = None,
    forced: Sequence[int] = (),
) -> list[RanUnit]:
    found = requests or {}
    return [
        run_unit(
            model,
            unit_of(model, slot, number, found.get(number, ()), is_forced=number in forced),
        )
        for number in numbers
    ]


def ends(outputs: Sequence[UnitOutput]) -> list[tuple[int, int, SpeechOutcome]]:
    """Return the unit, the request and the outcome of each result."""
    return [
        (number, result.number, result.outcome)
        for number, output in enumerate(outputs)
        for result in output.speech_results
    ]


def text_of(outputs: Sequence[UnitOutput], request: int) -> str:
    return "".join(output.text for output in outputs if output.speech_request == request)


def test_text_is_spoken_in_the_first_unit_and_the_turn_ends(model: DuplexModel) -> None:
    model.open(0, VOICED)
    outputs = run(model, 0, range(8), {0: [GREETING]})
    assert text_of(outputs, 0) == GREETING
    (end,) = ends(outputs)
    last = end[0]
    assert end == (last, 0, SPOKEN)
    assert [output.speech_request for output in outputs] == [0] * (last + 1) + [None] * (7 - last)
    assert [output.end_of_turn for output in outputs] == [n == last for n in range(8)]
    for output in outputs[: last + 1]:
        assert not output.is_listen
        assert output.audio.size
        assert 0 < len(output.text) < MAX_UNIT_CHARACTERS or output is outputs[last]
    assert all(output.is_listen for output in outputs[last + 1 :])


def test_requests_are_spoken_one_after_the_other(model: DuplexModel) -> None:
    model.open(0, QUIET)
    outputs = run(model, 0, range(16), {2: [GREETING, RESULT], 3: [RESULT]})
    assert [(number, outcome) for _, number, outcome in ends(outputs)] == [
        (20, SPOKEN),
        (21, SPOKEN),
        (30, SPOKEN),
    ]
    assert [text_of(outputs, number) for number in (20, 21, 30)] == [GREETING, RESULT, RESULT]


def test_a_request_waits_while_the_model_is_in_a_turn_of_its_own(model: DuplexModel) -> None:
    options = replace(SAMPLED, force_listen_count=0, generate_audio=False)
    units = range(8)
    model.open(0, options)
    own = run(model, 0, units)
    assert not any(output.is_listen or output.end_of_turn for output in own)
    model.open(1, options)
    waiting = run(model, 1, units, {2: [RESULT]})
    for ours, theirs in zip(waiting, own, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.speech_request, ours.speech_results) == (None, ())
    outputs = run(model, 1, range(8, 16), {9: [GREETING]}, forced=[8])
    assert ends(outputs)[0] == (0, 20, INTERRUPTED)
    assert text_of(outputs, 90) == GREETING


def test_a_forced_listen_ends_the_text_and_those_that_wait(model: DuplexModel) -> None:
    model.open(0, QUIET)
    outputs = run(model, 0, range(12), {0: [GREETING, RESULT], 1: [RESULT]}, forced=[1])
    assert outputs[0].text
    assert outputs[1].is_listen
    assert outputs[1].interrupted_turn
    first, second, *others = ends(outputs)
    assert (first, second) == ((1, 0, INTERRUPTED), (1, 1, INTERRUPTED))
    assert [(number, outcome) for _, number, outcome in others] == [(10, SPOKEN)]
    assert outputs[2].speech_request == 10, "the request of the interrupting unit comes next"
    assert text_of(outputs, 10) == RESULT


class Recorded(DuplexSampling):
    """Records each choice."""

    script: deque[Choice]

    def choose(
        self,
        conversations: Sequence[Any],
        logits: torch.Tensor,
        begins_unit: Sequence[bool] = (),
        required: Sequence[Any] = (),
    ) -> list[Choice]:
        choices = super().choose(conversations, logits, begins_unit, required)
        self.script += choices
        return choices


class Chosen(DuplexSampling):
    """Chooses recorded ids for one conversation, as if the model had drawn them."""

    script: deque[Choice]

    def choose(
        self,
        conversations: Sequence[Any],
        logits: torch.Tensor,
        begins_unit: Sequence[bool] = (),
        required: Sequence[Any] = (),
    ) -> list[Choice]:
        assert not any(required)
        (each,) = conversations
        choice = self.script.popleft()
        is_counted = choice.decision is Decision.CHOICE
        if is_counted:
            self._penalised.push([(each.slot, choice.token, each.recent)])
        if not each.draws.is_greedy:
            each.uniforms.advance(2 if is_counted else 1)
        return [choice]


@pytest.mark.parametrize("mode", [DecodeMode.SAMPLING, DecodeMode.GREEDY])
def test_the_context_is_that_of_a_model_that_has_chosen_the_same_ids(
    model: DuplexModel, mode: DecodeMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_greedy = mode is DecodeMode.GREEDY
    options = replace(SAMPLED, decode_mode=mode, generate_audio=not is_greedy)
    for slot in (0, 1):
        model.open(slot, options)
        run(model, slot, range(3))
    script = deque[Choice]()
    monkeypatch.setattr(model.sampling, "script", script, raising=False)
    monkeypatch.setattr(model.sampling, "__class__", Recorded)
    requested = run(model, 0, range(3, 4), {3: [GREETING]})
    while not requested[-1].end_of_turn:
        requested += run(model, 0, range(3 + len(requested), 4 + len(requested)))
    count = len(requested)
    monkeypatch.setattr(model.sampling, "__class__", Chosen)
    chosen = run(model, 1, range(3, 3 + count))
    monkeypatch.setattr(model.sampling, "__class__", DuplexSampling)
    assert not script
    for ours, theirs in zip(requested, chosen, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
        assert np.array_equal(ours.audio, theirs.audio)
        assert ours.change
        own = replace(ours.change, was_requested=False, requests=())
        assert own == theirs.change
        assert (ours.speech_request, theirs.speech_request) == (30, None)
        assert ours.listen_probability is None
    for ours, theirs in zip(*(model.llm.cache.read(slot) for slot in (0, 1)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    later = range(3 + count, 6 + count)
    assert_same_units(run(model, 0, later), run(model, 1, later))


@dataclass(frozen=True)
class Script:
    """A conversation with requests, and the numbers of past units after which it is rebuilt."""

    options: ConversationOptions
    requests: Requests
    cuts: tuple[int, ...]
    forced: tuple[int, ...] = ()
    units: int = 14


SCRIPTS = {
    "greeting": Script(VOICED, {0: [GREETING]}, (2,), units=6),
    "waiting": Script(QUIET, {3: [GREETING, RESULT], 5: [RESULT]}, (4, 6, 8)),
    "interrupted": Script(QUIET, {0: [GREETING, RESULT], 1: [RESULT]}, (1, 2, 3), (1,)),
    "window": Script(
        replace(
            QUIET,
            sliding_window_mode=WindowMode.CONTEXT,
            context_max_units=4,
            context_previous_max_tokens=30,
        ),
        {1: [GREETING], 5: [RESULT]},
        (3, 7),
    ),
    "then free": Script(
        replace(SAMPLED, generate_audio=False, force_listen_count=1), {0: [GREETING]}, (2, 6)
    ),
    "short units": Script(
        replace(QUIET, max_new_speak_tokens_per_chunk=3), {0: [GREETING]}, (4,), units=20
    ),
}


@pytest.mark.parametrize(
    ("name", "cut"), [(name, cut) for name, script in SCRIPTS.items() for cut in script.cuts]
)
def test_the_next_worker_speaks_what_was_not_spoken(
    model: DuplexModel, name: str, cut: int
) -> None:
    script = SCRIPTS[name]
    model.open(0, script.options)
    outputs = run(model, 0, range(script.units), script.requests, script.forced)
    model.open(1, script.options)
    rebuild(model, 1, past_units(1, outputs[:cut]))
    later = run(model, 1, range(cut, script.units), script.requests, script.forced)
    assert_same_units(later, outputs[cut:])
    for ours, theirs in zip(later, outputs[cut:], strict=True):
        assert ours.speech_request == theirs.speech_request
        assert ours.speech_results == theirs.speech_results
    texts = [text for own in script.requests.values() for text in own]
    if not script.forced:
        assert len(ends(outputs)) == len(texts)


@pytest.mark.slow
@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=st.dictionaries(
        st.integers(0, 5), st.lists(st.sampled_from([GREETING, RESULT]), max_size=2), max_size=3
    ),
    forced=st.sets(st.integers(0, 5), max_size=2),
    seed=st.integers(0, 1000),
)
def test_neighbours_of_requests_have_the_same_ids(
    model: DuplexModel, requests: dict[int, list[str]], forced: set[int], seed: int
) -> None:
    free = replace(SAMPLED, seed=seed, force_listen_count=1, generate_audio=False)
    options = (free, replace(free, seed=seed + 1), QUIET)
    wanted: tuple[Requests, ...] = ({}, {}, requests)
    listens = ((), (), tuple(forced))
    alone: list[list[RanUnit]] = []
    for slot in range(SLOTS):
        model.close(slot)
        model.open(slot, options[slot])
        alone.append(run(model, slot, range(6), wanted[slot], listens[slot]))
        model.close(slot)
        model.open(slot, options[slot])
    for number in range(6):
        units = [
            unit_of(
                model,
                slot,
                number,
                wanted[slot].get(number, ()),
                is_forced=number in listens[slot],
            )
            for slot in range(SLOTS)
        ]
        for result in model.step(units):
            assert isinstance(result, UnitOutput)
            before = alone[result.slot][number]
            assert result.token_ids == before.token_ids
            assert result.speech_request == before.speech_request
            assert result.speech_results == before.speech_results
        assert not model.settle(range(SLOTS))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("stop <|listen|> now", "special token, <|listen|>"),
        ("</unit>", "special token, </unit>"),
        ("\ud7ff <|im_end|>", "special token"),
    ],
)
def test_a_text_with_marks_is_refused_and_changes_nothing(
    model: DuplexModel, text: str, fault: str
) -> None:
    model.open(0, QUIET)
    unit = unit_of(model, 0, 0, [text, RESULT])
    (result,) = unit.speech_results
    assert (result.number, result.outcome, result.reason) == (0, REFUSED, "INVALID_FIELD")
    assert result.field == "speech_requests[0].text"
    assert fault in result.message
    outputs = [run_unit(model, unit), *run(model, 0, range(1, 10))]
    assert text_of(outputs, 1) == RESULT


def test_ids_that_the_model_may_not_choose_are_spelled(model: DuplexModel) -> None:
    bad = model.tokens.bad_ids
    assert bad, "the checkpoint forbids no ids"
    words = [text for token in bad if (text := model.tokens.decode([token])).isalpha()][:4]
    unit = unit_of(model, 0, 0, [" ".join(words) or "a"])
    for request in unit.speech:
        assert not set(bad).intersection(request.ids)
        assert model.tokens.decode(request.ids) == " ".join(words)


def test_too_many_requests_are_refused(model: DuplexModel) -> None:
    model.open(0, QUIET)
    texts = [GREETING] * (MAX_SPEECH_REQUESTS - 1)
    (first,) = run(model, 0, range(1), {0: texts})
    (second,) = run(model, 0, range(1, 2), {1: [RESULT, RESULT, RESULT]})
    assert first.speech_results == ()
    refused = [end for end in second.speech_results if end.outcome is REFUSED]
    assert [(end.number, end.reason) for end in refused] == [
        (number, "TOO_MANY_REQUESTS") for number in (11, 12)
    ]


def test_units_too_short_for_text_refuse_requests(model: DuplexModel) -> None:
    model.open(0, replace(QUIET, max_new_speak_tokens_per_chunk=2))
    outputs = run(model, 0, range(2), {0: [GREETING]})
    (result,) = outputs[0].speech_results
    assert (result.outcome, result.field) == (REFUSED, "speech_requests")
    assert all(output.is_listen for output in outputs)


@pytest.mark.parametrize(
    "broken",
    [
        {"requests": ((0, (5,)),)},
        {"requests": ((0, ()),)},
        {"requests": ((0, (1 << 30, 6)),)},
        {"requests": ()},
        {"was_requested": True, "ended_requests": True},
    ],
)
def test_a_past_unit_with_impossible_requests_is_refused(
    model: DuplexModel, broken: dict[str, Any]
) -> None:
    model.open(0, QUIET)
    outputs = run(model, 0, range(2), {0: [GREETING]})
    (first, second) = past_units(1, outputs)
    change = rebuild_state.decode(second.state if "ended_requests" in broken else first.state)
    wrong = rebuild_state.encode(replace(change, **broken))
    past = (
        [first, replace(second, state=wrong)]
        if "ended_requests" in broken
        else [replace(first, state=wrong), second]
    )
    model.open(1, QUIET)
    failure = model.rebuild(1, past)
    assert isinstance(failure, UnitFailure)
    assert (failure.reason, failure.field) == ("REBUILD_REFUSED", "rebuild_state")
