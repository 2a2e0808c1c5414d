"""Each option changes the results of its own conversation and of no other."""

from dataclasses import fields, replace

import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    Unit,
    UnitOutput,
    WindowMode,
)

AUDIO = GOLDEN / "audio"
UNIT = 16_000
TALK = read_audio(AUDIO / "talk.wav", 16 * UNIT)
UNITS = 8
BASE = ConversationOptions(
    "Streaming Omni Conversation.",
    generate_audio=False,
    seed=11,
    force_listen_count=0,
    temperature=1.5,
    top_k=0,
    top_p=0,
)
HEARD = replace(BASE, generate_audio=True)
CHANGED = {
    "system_prompt": replace(BASE, system_prompt="Another."),
    "llm_voice": replace(BASE, llm_voice=read_clip(AUDIO / "ref2.wav")),
    "generate_audio": HEARD,
    "seed": replace(BASE, seed=12),
    "decode_mode": replace(BASE, decode_mode=DecodeMode.GREEDY),
    "temperature": replace(BASE, temperature=0.3),
    "top_k": replace(BASE, top_k=1),
    "top_p": replace(BASE, top_p=0.05),
    "text_repetition_penalty": replace(BASE, text_repetition_penalty=8.0),
    "text_repetition_window_size": replace(
        BASE, text_repetition_penalty=8.0, text_repetition_window_size=1
    ),
    "length_penalty": replace(BASE, length_penalty=0.05),
    "listen_prob_scale": replace(BASE, listen_prob_scale=3.0),
    "listen_top_k": replace(BASE, listen_top_k=4),
    "force_listen_count": replace(BASE, force_listen_count=4),
    "max_new_speak_tokens_per_chunk": replace(BASE, max_new_speak_tokens_per_chunk=5),
    "tts_temperature": replace(HEARD, tts_temperature=0.2),
    "sliding_window_mode": replace(
        BASE,
        sliding_window_mode=WindowMode.BASIC,
        basic_window_high_tokens=100,
        basic_window_low_tokens=60,
    ),
    "basic_window_high_tokens": replace(
        BASE,
        sliding_window_mode=WindowMode.BASIC,
        basic_window_high_tokens=120,
        basic_window_low_tokens=60,
    ),
    "basic_window_low_tokens": replace(
        BASE,
        sliding_window_mode=WindowMode.BASIC,
        basic_window_high_tokens=100,
        basic_window_low_tokens=90,
    ),
    "context_max_units": replace(BASE, sliding_window_mode=WindowMode.CONTEXT, context_max_units=3),
    "context_previous_max_tokens": replace(
        BASE,
        sliding_window_mode=WindowMode.CONTEXT,
        context_max_units=3,
        context_previous_max_tokens=1,
    ),
}
"""For each option: a conversation whose value of this option differs from `BASE`, or from the last
entry."""


def play(model: DuplexModel, slots: dict[int, ConversationOptions]) -> dict[int, list[UnitOutput]]:
    """Run conversations together over the same sound; return the outputs of each slot."""
    said: dict[int, list[UnitOutput]] = {slot: [] for slot in slots}
    for slot, options in slots.items():
        model.open(slot, options)
    for number in range(3, 3 + UNITS):
        audio = TALK[number * UNIT : (number + 1) * UNIT]
        for output in model.step([Unit(slot, audio) for slot in slots]):
            assert isinstance(output, UnitOutput)
            said[output.slot].append(output)
        model.settle(list(slots))
    for slot in slots:
        model.close(slot)
    return said


def alone(model: DuplexModel, options: ConversationOptions) -> list[UnitOutput]:
    return play(model, {0: options})[0]


_said: dict[int, list[UnitOutput]] = {}


def known(model: DuplexModel, options: ConversationOptions) -> list[UnitOutput]:
    """Return what `alone` returns. `options` is a constant of this file, and is played once."""
    if id(options) not in _said:
        _said[id(options)] = alone(model, options)
    return _said[id(options)]


def ids(said: list[UnitOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in said]


def told(said: list[UnitOutput]) -> list[tuple[object, ...]]:
    return [(o.token_ids, o.context_length, o.audio_token_count, o.audio.tobytes()) for o in said]


def test_every_option_is_looked_at() -> None:
    names = {entry.name for entry in fields(ConversationOptions)}
    assert names - set(CHANGED) == {"tts_voice"}


@pytest.mark.parametrize("name", CHANGED)
def test_each_option_has_an_effect(model: DuplexModel, name: str) -> None:
    before = {
        "tts_temperature": "generate_audio",
        "text_repetition_window_size": "text_repetition_penalty",
        "basic_window_high_tokens": "sliding_window_mode",
        "basic_window_low_tokens": "sliding_window_mode",
        "context_previous_max_tokens": "context_max_units",
    }
    base = CHANGED[before[name]] if name in before else BASE
    assert told(known(model, CHANGED[name])) != told(known(model, base))


@pytest.mark.parametrize("start", range(0, len(CHANGED), 3))
def test_seeded_conversations_are_the_same_in_any_company(model: DuplexModel, start: int) -> None:
    chosen = list(CHANGED.values())[start : start + 3]
    together = play(model, dict(enumerate([*chosen, BASE])))
    for slot, options in enumerate(chosen):
        assert ids(together[slot]) == ids(play(model, {3: options})[3])
    assert ids(together[len(chosen)]) == ids(known(model, BASE))


@pytest.mark.parametrize(
    "certain",
    [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 0.0}, {"temperature": 1e-5}],
)
def test_the_ways_to_take_the_likeliest_id_agree(
    model: DuplexModel, certain: dict[str, float]
) -> None:
    expected = ids(alone(model, replace(BASE, top_k=1, top_p=0, temperature=1.0)))
    assert ids(alone(model, replace(BASE, **certain))) == expected


def test_greedy_decoding_needs_no_seed(model: DuplexModel) -> None:
    runs = [
        alone(model, replace(HEARD, decode_mode=DecodeMode.GREEDY, seed=seed)) for seed in (1, 2)
    ]
    assert ids(runs[0]) == ids(runs[1])
    assert [o.audio_token_count for o in runs[0]] == [o.audio_token_count for o in runs[1]]


def test_no_penalty_and_no_window_to_penalise_are_the_same(model: DuplexModel) -> None:
    none = replace(BASE, text_repetition_penalty=1.0)
    empty = replace(BASE, text_repetition_penalty=8.0, text_repetition_window_size=0)
    assert ids(alone(model, none)) == ids(alone(model, empty))


def test_units_listen_and_speak_as_long_as_they_may(model: DuplexModel) -> None:
    listening = known(model, CHANGED["force_listen_count"])
    assert [output.is_listen for output in listening[:4]] == [True] * 4
    assert not all(output.is_listen for output in listening)
    short = known(model, CHANGED["max_new_speak_tokens_per_chunk"])
    # While the model speaks, the terminator and the unit end are not fed.
    assert max(len(output.token_ids) - 2 for output in short) == 4
    assert max(len(output.token_ids) - 2 for output in known(model, BASE)) > 4


def test_a_long_length_penalty_makes_longer_turns(model: DuplexModel) -> None:
    def turn_ends(penalty: float) -> int:
        said = alone(model, replace(BASE, length_penalty=penalty))
        return sum(output.token_ids.count(model.tokens.turn_eos) for output in said)

    assert turn_ends(20.0) < turn_ends(0.05)


def test_the_rank_of_listening_decides_before_any_draw(model: DuplexModel) -> None:
    always = alone(model, replace(BASE, listen_top_k=model.llm.vocabulary))
    chosen = {token for output in always for token in output.token_ids[:-2]}
    assert chosen <= {model.tokens.eos}


def test_a_silent_conversation_says_the_same_and_is_not_heard(model: DuplexModel) -> None:
    greedy = replace(BASE, decode_mode=DecodeMode.GREEDY)
    heard, silent = alone(model, replace(greedy, generate_audio=True)), alone(model, greedy)
    assert ids(heard) == ids(silent)
    assert any(output.audio.size for output in heard)
    assert not any(output.audio.size or output.audio_token_count for output in silent)


def test_the_talkers_temperature_changes_the_speech_of_the_same_words(model: DuplexModel) -> None:
    warm, cold = alone(model, HEARD), known(model, CHANGED["tts_temperature"])
    first = next(index for index, output in enumerate(warm) if output.audio_token_count)
    assert ids(warm[: first + 1]) == ids(cold[: first + 1])
    assert warm[first].audio.tobytes() != cold[first].audio.tobytes()
