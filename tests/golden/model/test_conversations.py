"""Conversations that join and leave a model have the same results as when they run alone."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.paths import GOLDEN
from support.speech import assert_sounds_equal
from torch import Tensor

from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.worker.models.interface import Continue, Part, Result, Unfinished
from duplane.worker.models.minicpm_o.duplex.sampling import Choice, Decision, DuplexSampling
from duplane.worker.models.minicpm_o.llm.kv_cache import Rows
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    Opened,
    OptionError,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)

AUDIO = GOLDEN / "audio"
UNIT = 16_000
TALK = read_audio(AUDIO / "talk.wav", 40 * UNIT)
GREEDY = ConversationOptions(
    "Streaming Omni Conversation.",
    llm_voice=read_clip(AUDIO / "ref1.wav"),
    seed=1,
    decode_mode=DecodeMode.GREEDY,
    force_listen_count=0,
)
SAMPLED = ConversationOptions(
    "You are a helpful assistant.",
    seed=7,
    force_listen_count=1,
    temperature=1.2,
    top_k=0,
    top_p=0.95,
    text_repetition_window_size=4,
    text_repetition_penalty=1.3,
)
TEXT_ONLY = ConversationOptions(
    "Short.",
    generate_audio=False,
    decode_mode=DecodeMode.GREEDY,
    length_penalty=2.0,
    max_new_speak_tokens_per_chunk=6,
)
OTHER_VOICE = ConversationOptions(
    "Speak like this.",
    llm_voice=read_clip(AUDIO / "ref2.wav"),
    seed=3,
    decode_mode=DecodeMode.GREEDY,
    force_listen_count=2,
    listen_prob_scale=0.5,
)


@dataclass(frozen=True)
class Script:
    """One conversation: the round in which it joins, its offset in the sound, its unit count."""

    options: ConversationOptions
    joins: int
    offset: int
    units: int
    forced: tuple[int, ...] = ()

    def unit(self, slot: int, number: int) -> Unit:
        start = (self.offset + number) * UNIT
        return Unit(slot, TALK[start : start + UNIT], number in self.forced)


SCRIPTS = (
    Script(GREEDY, joins=0, offset=3, units=8, forced=(4,)),
    Script(SAMPLED, joins=2, offset=9, units=6),
    Script(TEXT_ONLY, joins=1, offset=0, units=5),
    Script(OTHER_VOICE, joins=3, offset=14, units=6, forced=(3, 4)),
)


def unit_at(number: int, *, samples: int = UNIT) -> NDArray[np.float32]:
    return TALK[number * UNIT : number * UNIT + samples]


def run(model: DuplexModel, units: Sequence[Unit]) -> list[UnitOutput | UnitFailure]:
    results = list(model.step(units))
    model.settle([unit.slot for unit in units])
    return results


def outputs(model: DuplexModel, units: Sequence[Unit]) -> list[UnitOutput]:
    results = run(model, units)
    assert all(isinstance(result, UnitOutput) for result in results), results
    return [result for result in results if isinstance(result, UnitOutput)]


def play(model: DuplexModel, slots: dict[int, Script]) -> dict[int, list[UnitOutput]]:
    """Run scripts together, each in its slot; close each when it ends."""
    said: dict[int, list[UnitOutput]] = {slot: [] for slot in slots}
    first = min(script.joins for script in slots.values())
    last = max(script.joins + script.units for script in slots.values())
    for clock in range(first, last):
        for slot, script in slots.items():
            if clock == script.joins:
                model.open(slot, script.options)
        present = {
            slot: clock - script.joins
            for slot, script in slots.items()
            if script.joins <= clock < script.joins + script.units
        }
        units = [slots[slot].unit(slot, number) for slot, number in present.items()]
        for output in outputs(model, units[::-1]):
            said[output.slot].append(output)
        for slot, number in present.items():
            if number == slots[slot].units - 1:
                model.close(slot)
                assert model.is_clean(slot)
    return said


def assert_same(got: list[UnitOutput], want: list[UnitOutput]) -> None:
    assert [output.token_ids for output in got] == [output.token_ids for output in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.text == theirs.text
        assert (ours.is_listen, ours.end_of_turn) == (theirs.is_listen, theirs.end_of_turn)
        assert ours.context_length == theirs.context_length
        assert ours.audio_token_count == theirs.audio_token_count
        assert_sounds_equal(ours.audio, theirs.audio)


@pytest.mark.parametrize("slots", [(0, 1), (2, 0), (0, 1, 2, 3), (3, 1, 0, 2)])
def test_conversations_at_once_are_what_each_is_alone(
    model: DuplexModel, slots: tuple[int, ...]
) -> None:
    together = play(model, dict(zip(slots, SCRIPTS, strict=False)))
    for slot, script in zip(slots, SCRIPTS, strict=False):
        alone = play(model, {1: script})
        assert_same(together[slot], alone[1])


def test_the_scripts_listen_speak_and_end_turns(model: DuplexModel) -> None:
    said = [output for script in SCRIPTS for output in play(model, {0: script})[0]]
    assert any(output.is_listen for output in said)
    assert any(output.end_of_turn for output in said)
    assert any(len(output.audio) == 24_000 for output in said)
    assert any(output.text and not len(output.audio) for output in said)


def test_listening_units_come_out_before_speaking_ones_are_finished(model: DuplexModel) -> None:
    model.open(0, GREEDY)
    model.open(1, OTHER_VOICE)
    seen = [outputs(model, [Unit(0, unit_at(3)), Unit(1, unit_at(3))])]
    for number in range(4, 8):
        units = [Unit(0, unit_at(number)), Unit(1, unit_at(number), force_listen=True)]
        seen.append(outputs(model, units))
    mixed = [[output.is_listen for output in results] for results in seen]
    assert [True, False] in mixed
    assert [False, True] not in mixed


def test_a_forced_listen_says_whether_it_interrupted_a_turn(model: DuplexModel) -> None:
    model.open(0, GREEDY)
    is_turn_open = False
    interruptions: list[bool] = []
    for number in range(3, 12):
        is_forced = is_turn_open or number == 3
        (output,) = outputs(model, [Unit(0, unit_at(number), force_listen=is_forced)])
        assert output.interrupted_turn == (is_forced and is_turn_open)
        assert not (output.interrupted_turn and output.end_of_turn)
        interruptions.append(output.interrupted_turn)
        is_turn_open = not output.is_listen and not output.end_of_turn
    assert any(interruptions)


def test_listening_amid_a_turn_interrupts_it(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens.load(GOLDEN / "checkpoint")
    script = iter((tokens.speak, 5, tokens.chunk_eos, tokens.turn_eos, tokens.listen))

    def choose(*_: object) -> list[Choice]:
        token = next(script)
        is_end = token == tokens.chunk_eos
        return [Choice(token, Decision.CHUNK_END if is_end else Decision.CHOICE, 0.25)]

    monkeypatch.setattr(DuplexSampling, "choose", choose)
    model.open(0, replace(GREEDY, generate_audio=False))
    (speech,) = outputs(model, [Unit(0, unit_at(3))])
    (listen,) = outputs(model, [Unit(0, unit_at(4))])
    assert not speech.is_listen
    assert not speech.interrupted_turn
    assert listen.is_listen
    assert listen.interrupted_turn
    assert not listen.is_forced
    assert listen.change is not None
    assert not listen.change.interrupted_turn, "a rebuild would feed the end of the turn twice"
    assert next(script, None) is None


def test_each_drawn_unit_says_how_likely_listening_was(model: DuplexModel) -> None:
    sampled = play(model, {0: SCRIPTS[1]})[0]
    assert [output.is_forced for output in sampled] == [True] + [False] * 5
    assert sampled[0].listen_probability is None
    likely = [output.listen_probability for output in sampled[1:]]
    assert all(each is not None and 0 <= each <= 1 for each in likely)
    assert len(set(likely)) > 1
    greedy = play(model, {0: SCRIPTS[0]})[0]
    assert [output.listen_probability for output in greedy] == [None] * 8
    assert [output.is_forced for output in greedy] == [number == 4 for number in range(8)]


def test_a_seeded_conversation_can_be_repeated_and_others_cannot(model: DuplexModel) -> None:
    script = SCRIPTS[1]
    first, again = play(model, {0: script})[0], play(model, {3: script})[3]
    assert_same(first, again)
    unseeded = Script(ConversationOptions(temperature=1.2, force_listen_count=0), 0, 9, 4)
    runs = [play(model, {0: unseeded})[0] for _ in range(2)]
    assert [o.token_ids for o in runs[0]] != [o.token_ids for o in runs[1]]


def test_a_unit_is_whole_in_the_context_once_it_is_settled(model: DuplexModel) -> None:
    opened = model.open(0, GREEDY)
    length = opened.context_length
    for number in range(6):
        (output,) = outputs(model, [Unit(0, unit_at(number))])
        length += 11 + len(output.token_ids)
        assert output.context_length == length - 2
        assert model.context_length(0) == length
    records = model.conversations[0].window.units
    assert sum(record.row_count for record in records) == length - opened.context_length


def test_a_listening_unit_is_one_pass_of_the_llm(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    forward = model.llm.model.forward

    def counted(embeds: Tensor, rows: Rows) -> Tensor:
        passes.append(len(embeds))
        return forward(embeds, rows)

    model.open(0, replace(GREEDY, force_listen_count=9))
    monkeypatch.setattr(model.llm.model, "forward", counted)
    for number in range(3):
        outputs(model, [Unit(0, unit_at(number))])
    # Each pass has `<unit>` and the audio. From the second unit on, it also has two closing ids of
    # the unit before.
    assert passes == [11, 13, 13]


def test_too_little_audio_is_kept_for_the_next_unit(model: DuplexModel) -> None:
    model.open(0, GREEDY)
    outputs(model, [Unit(0, unit_at(0))])
    before = model.context_length(0)
    (failure,) = run(model, [Unit(0, unit_at(1, samples=UNIT // 2))])
    assert isinstance(failure, UnitFailure)
    assert (failure.reason, failure.is_fatal) == ("AUDIO_TOO_SHORT", False)
    assert model.context_length(0) == before
    rest = TALK[UNIT + UNIT // 2 : 2 * UNIT]
    (late,) = outputs(model, [Unit(0, rest)])
    model.open(1, GREEDY)
    (_, prompt) = (outputs(model, [Unit(1, unit_at(n))]) for n in range(2))
    assert late.token_ids == prompt[0].token_ids


@pytest.mark.parametrize(
    ("audio", "reason"),
    [
        (np.full(UNIT, np.nan, np.float32), "AUDIO_INVALID"),
        (np.zeros(40 * UNIT, np.float32), "AUDIO_BACKLOG"),
        (np.zeros(0, np.float32), "AUDIO_TOO_SHORT"),
    ],
)
def test_a_bad_unit_fails_alone_and_its_conversation_goes_on(
    model: DuplexModel, audio: NDArray[np.float32], reason: str
) -> None:
    model.open(0, GREEDY)
    model.open(1, GREEDY)
    results = run(model, [Unit(0, audio), Unit(1, unit_at(3))])
    (failure,) = [result for result in results if isinstance(result, UnitFailure)]
    assert (failure.slot, failure.reason, failure.is_fatal) == (0, reason, False)
    (good,) = [result for result in results if isinstance(result, UnitOutput)]
    (later,) = outputs(model, [Unit(0, unit_at(3))])
    assert later.token_ids == good.token_ids


def test_frames_are_refused_where_the_model_cannot_see(model: DuplexModel) -> None:
    blind = DuplexModel(replace(model.parts, vision=None))
    blind.open(0, GREEDY)
    (failure,) = run(blind, [Unit(0, unit_at(0), frames=(b"jpeg",))])
    assert isinstance(failure, UnitFailure)
    assert (failure.reason, blind.parts.vision is not None) == ("FRAMES_UNSUPPORTED", False)
    blind.close(0)


def test_a_conversation_whose_numbers_break_fails_and_no_other(model: DuplexModel) -> None:
    for slot in (0, 1, 2):
        model.open(slot, GREEDY)
    model.llm.cache.read(1)[1][:, :, :4] = float("nan")
    results = run(model, [Unit(slot, unit_at(3)) for slot in (0, 1, 2)])
    (failure,) = [result for result in results if isinstance(result, UnitFailure)]
    assert (failure.slot, failure.reason, failure.is_fatal) == (1, "NOT_FINITE", True)
    model.close(1)
    assert model.is_clean(1)
    model.open(1, GREEDY)
    (fresh,) = outputs(model, [Unit(1, unit_at(3))])
    assert {o.token_ids for o in results if isinstance(o, UnitOutput)} == {fresh.token_ids}


def test_the_unit_that_fills_the_context_is_whole_and_the_next_is_refused(
    model: DuplexModel,
) -> None:
    model.open(0, GREEDY)
    lengths = [0]
    numbers = (number % 30 for number in range(60))
    results = (run(model, [Unit(0, unit_at(number))])[0] for number in numbers)
    result = next(results)
    while isinstance(result, UnitOutput):
        lengths.append(result.context_length)
        result = next(results)
    assert (result.reason, result.is_fatal) == ("CONTEXT_FULL", False)
    assert lengths[-2] < model.context_capacity <= model.context_length(0)


def test_a_prompt_can_be_fed_in_parts(model: DuplexModel) -> None:
    whole = model.open(0, GREEDY)
    model.begin(1, model.preparer.conversation(GREEDY))
    with pytest.raises(ValueError, match="not open yet"):
        list(model.step([Unit(1, unit_at(0))]))
    item, parts = Continue(1, Part.FEED, 7), list[Result]()
    while not parts or isinstance(parts[-1], Unfinished):
        parts += model.launch([item])
    assert isinstance(parts[-1], Opened)
    assert replace(parts[-1], slot=0) == whole
    assert len(parts) == -(-whole.context_length // 7)
    with pytest.raises(ValueError, match="has no work for feed"):
        list(model.launch([item]))
    (keys, _), (in_parts, _) = (model.llm.cache.read(slot) for slot in (0, 1))
    torch.testing.assert_close(keys, in_parts, atol=1e-5, rtol=0)
    assert_same(outputs(model, [Unit(1, unit_at(3))]), outputs(model, [Unit(0, unit_at(3))]))
    model.close(1)
    model.begin(1, model.preparer.conversation(GREEDY))
    model.close(1)
    assert model.is_clean(1)


def test_an_unsettled_slot_takes_no_unit(model: DuplexModel) -> None:
    window = {"sliding_window_mode": WindowMode.CONTEXT, "context_max_units": 1}
    model.open(0, replace(GREEDY, **window))
    for number in range(2):
        list(model.step([Unit(0, unit_at(number))]))
    with pytest.raises(ValueError, match="not settled"):
        list(model.step([Unit(0, unit_at(1))]))
    model.settle([0])
    model.settle([0])
    outputs(model, [Unit(0, unit_at(1))])


def test_slots_without_conversation_and_slots_named_twice_are_refused(model: DuplexModel) -> None:
    with pytest.raises(ValueError, match="no conversation"):
        list(model.step([Unit(2, unit_at(0))]))
    model.open(0, GREEDY)
    with pytest.raises(ValueError, match="has a conversation"):
        model.open(0, GREEDY)
    with pytest.raises(ValueError, match="twice"):
        list(model.step([Unit(0, unit_at(0))] * 2))


def test_a_prompt_that_does_not_fit_leaves_the_slot_clean(model: DuplexModel) -> None:
    for text in ("word " * 600, "a" * 10_000_000):
        with pytest.raises(OptionError, match="system_prompt"):
            model.open(0, ConversationOptions(text))
        assert model.is_clean(0)


def test_a_step_that_is_abandoned_leaves_nothing_after_close(model: DuplexModel) -> None:
    for slot in (0, 1):
        model.open(slot, GREEDY)
    results = model.step([Unit(0, unit_at(3), force_listen=True), Unit(1, unit_at(3))])
    assert isinstance(next(results), UnitOutput)
    results.close()
    for slot in (0, 1):
        assert not model.is_clean(slot)
        model.close(slot)
        assert model.is_clean(slot)


def test_memory_is_the_same_after_many_conversations(model: DuplexModel) -> None:
    def tensor_bytes() -> int:
        gc.collect()
        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        storages = {found.untyped_storage().data_ptr(): found for found in tensors}
        return sum(found.untyped_storage().nbytes() for found in storages.values())

    def converse() -> None:
        play(model, {0: Script(GREEDY, 0, 3, 2), 2: Script(SAMPLED, 0, 3, 2)})

    converse()
    before, stated = tensor_bytes(), model.memory_bytes
    for _ in range(10):
        converse()
    assert tensor_bytes() == before
    assert model.memory_bytes == stated
    weights = (model.parts.llm, model.parts.talker)
    # The weights that a CPU packs are not in tensors.
    packed = [p.nbytes for part in weights if part for p in part.parameters() if p.is_meta]
    assert stated - sum(packed) <= before


def test_it_runs_in_half_precision(speaking_checkpoint: Path) -> None:
    half = DuplexModel.load(speaking_checkpoint, slot_count=2, dtype="bfloat16")
    for slot in range(2):
        half.open(slot, GREEDY)
    said = [
        output
        for number in range(6)
        for output in outputs(half, [Unit(slot, unit_at(number)) for slot in range(2)])
    ]
    assert any(len(output.audio) for output in said)
    assert all(np.isfinite(output.audio).all() for output in said)
