from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.paths import GOLDEN
from torch import Tensor

from duplane.worker.models.minicpm_o.duplex.sampling import Decision, DuplexSampling, SlotSampling
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms, Uniforms
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.types import ConversationOptions, DecodeMode

TOKENS = Tokens.load(GOLDEN / "checkpoint")
VOCABULARY = len(TOKENS)
PLAIN = ConversationOptions(
    decode_mode=DecodeMode.GREEDY, text_repetition_penalty=1.0, length_penalty=1.0
)


class Listed:
    """Uniform random numbers from a list."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)
        self.used_count = 0

    def peek(self, count: int) -> list[float]:
        return (self.numbers + [0.0] * count)[:count]

    def advance(self, count: int) -> None:
        del self.numbers[:count]
        self.used_count += count


class Sampling:
    """The sampling of several conversations, one for each element of `options`."""

    def __init__(self, *options: ConversationOptions) -> None:
        self.all = DuplexSampling(TOKENS, VOCABULARY, len(options), torch.device("cpu"))
        self._slots = [
            self.all.open(slot, each, SeededUniforms(slot)) for slot, each in enumerate(options)
        ]

    def choose(
        self, slots: Sequence[int], logits: Tensor, uniforms: Sequence[Uniforms]
    ) -> list[tuple[int, Decision]]:
        chosen: list[SlotSampling] = [
            replace(self._slots[slot], uniforms=source)
            for slot, source in zip(slots, uniforms, strict=True)
        ]
        return [choice[:2] for choice in self.all.choose(chosen, logits)]


def logits(**named: float) -> Tensor:
    """Return raw logits, 0 except for the named ids (`id_5`, or the name of a special token)."""
    made = torch.zeros(1, VOCABULARY)
    for name, value in named.items():
        token = int(name[3:]) if name.startswith("id_") else getattr(TOKENS, name)
        made[0, token] = value
    return made


def choose(
    made: Sampling,
    values: Tensor,
    uniforms: Sequence[Listed] = (),
    slots: Sequence[int] = (0,),
) -> list[tuple[int, Decision]]:
    return made.choose(slots, values, uniforms or [Listed() for _ in slots])


def test_the_end_of_a_chunk_is_decided_on_raw_logits() -> None:
    made = Sampling(replace(PLAIN, text_repetition_penalty=2.0))
    assert choose(made, logits(id_5=8.0)) == [(5, Decision.CHOICE)]
    # The raw logit of id 5 is above that of the chunk's end, so the chunk continues. The penalty
    # then lowers id 5 below id 6.
    assert choose(made, logits(id_5=8.0, chunk_eos=7.0, id_6=5.0)) == [(6, Decision.CHOICE)]
    assert choose(made, logits(id_5=8.0, chunk_eos=9.0)) == [(TOKENS.chunk_eos, Decision.CHUNK_END)]


def test_forbidden_ids_are_never_chosen() -> None:
    values = logits(**{f"id_{token}": 9.0 for token in TOKENS.forbidden[:-1]}, id_5=1.0)
    assert choose(Sampling(PLAIN), values) == [(5, Decision.CHOICE)]


def test_repetition_divides_whatever_the_sign() -> None:
    made = Sampling(replace(PLAIN, text_repetition_penalty=2.0))
    choose(made, logits(id_5=8.0))
    assert choose(made, logits(id_5=3.0, id_6=2.0))[0][0] == 6
    low = torch.full((1, VOCABULARY), -9.0)
    low[0, 5], low[0, 7] = -4.0, -3.0
    assert choose(made, low)[0][0] == 5


def test_the_repetition_window_forgets() -> None:
    made = Sampling(replace(PLAIN, text_repetition_penalty=2.0, text_repetition_window_size=2))
    contested = logits(id_5=3.0, id_9=2.0)
    choose(made, logits(id_5=8.0))
    assert choose(made, contested)[0][0] == 9
    assert choose(made, logits(id_7=8.0))[0][0] == 7
    assert choose(made, contested)[0][0] == 5


def test_the_length_penalty_holds_the_turn_open() -> None:
    values = logits(turn_eos=3.0, id_5=2.0)
    assert choose(Sampling(PLAIN), values)[0][0] == TOKENS.turn_eos
    assert choose(Sampling(replace(PLAIN, length_penalty=2.0)), values)[0][0] == 5
    low = torch.full((1, VOCABULARY), -9.0)
    low[0, TOKENS.turn_eos], low[0, 5] = -2.0, -3.0
    assert choose(Sampling(replace(PLAIN, length_penalty=2.0)), low)[0][0] == 5


def test_the_listen_options_act_on_the_end_of_sequence_id() -> None:
    values = logits(eos=2.0, id_5=3.0, id_6=2.5)
    scaled = Sampling(replace(PLAIN, listen_prob_scale=2.0))
    assert choose(scaled, values) == [(TOKENS.eos, Decision.CHOICE)]
    for rank, expected in ((2, Decision.CHOICE), (3, Decision.LISTEN_RANK)):
        assert choose(Sampling(replace(PLAIN, listen_top_k=rank)), values)[0][1] is expected


def test_draws_are_used_up_as_documented() -> None:
    drawn = replace(PLAIN, decode_mode=DecodeMode.SAMPLING, listen_top_k=1)
    made, source = Sampling(drawn), Listed(0.5, 0.5, 0.5, 0.5)
    assert choose(made, logits(chunk_eos=50.0), [source])[0][1] is Decision.CHUNK_END
    assert len(source.numbers) == 3
    assert choose(made, logits(eos=50.0), [source])[0][1] is Decision.LISTEN_RANK
    assert len(source.numbers) == 2
    assert choose(made, logits(id_5=50.0), [source]) == [(5, Decision.CHOICE)]
    assert not source.numbers
    greedy, untouched = Sampling(PLAIN), Listed(0.5)
    choose(greedy, logits(id_5=50.0), [untouched])
    assert untouched.numbers == [0.5]


DRAWN = replace(PLAIN, decode_mode=DecodeMode.SAMPLING, temperature=1.0, top_k=0, top_p=1.0)
GRID = 20


def listening(
    options: ConversationOptions, values: Tensor, *uniforms: float, begins_unit: bool = True
) -> float | None:
    """Return the reported probability of listening of one choice."""
    made = DuplexSampling(TOKENS, VOCABULARY, 1, torch.device("cpu"))
    slot = replace(made.open(0, options, SeededUniforms(0)), uniforms=Listed(*uniforms))
    (choice,) = made.choose([slot], values, [begins_unit])
    return choice.listen_probability


@pytest.mark.parametrize(
    "options",
    [
        DRAWN,
        replace(DRAWN, temperature=0.5),
        replace(DRAWN, temperature=2.0, top_k=3),
        replace(DRAWN, top_k=1),
        replace(DRAWN, top_p=0.5),
        replace(DRAWN, listen_top_k=2),
        replace(DRAWN, listen_prob_scale=3.0),
        replace(DRAWN, length_penalty=3.0),
        replace(DRAWN, temperature=0.0),
    ],
    ids=lambda options: (
        f"{options.temperature}-{options.top_k}-{options.top_p}"
        f"-{options.listen_top_k}-{options.listen_prob_scale}-{options.length_penalty}"
    ),
)
def test_the_reported_probability_is_the_share_of_draws_that_listen(
    options: ConversationOptions,
) -> None:
    values = torch.full((1, VOCABULARY), -9.0)
    for token, value in (("listen", 2.0), ("speak", 1.5), ("chunk_eos", 1.0), ("eos", 0.5)):
        values[0, getattr(TOKENS, token)] = value
    values[0, TOKENS.turn_eos] = 1.8
    steps = [(step + 0.5) / GRID for step in range(GRID)]
    pairs = [(first, second) for first in steps for second in steps]
    made = Sampling(*[options] * len(pairs))
    slots = range(len(pairs))
    chosen = choose(
        made, values.expand(len(pairs), -1), [Listed(*pair) for pair in pairs], tuple(slots)
    )
    share = sum(token == TOKENS.listen for token, _ in chosen) / len(pairs)
    assert listening(options, values, 0.5, 0.5) == pytest.approx(share, abs=2 / GRID)
    assert 0 <= (listening(options, values, 0.99, 0.01) or 0) <= 1


def test_penalties_lower_the_probability_of_listening() -> None:
    made = DuplexSampling(TOKENS, VOCABULARY, 1, torch.device("cpu"))
    options = replace(DRAWN, text_repetition_penalty=4.0)
    slot = made.open(0, options, SeededUniforms(0))
    values = logits(listen=12.0)
    first, second = (made.choose([slot], values, [True])[0] for _ in range(2))
    assert first.token == TOKENS.listen
    assert first.listen_probability is not None
    assert second.listen_probability is not None
    assert first.listen_probability > 0.9 > 0.1 > second.listen_probability


def test_only_the_draw_that_begins_a_unit_reports_the_probability_of_listening() -> None:
    values = logits(listen=2.0)
    assert listening(DRAWN, values, 0.5, 0.5) is not None
    assert listening(DRAWN, values, 0.5, 0.5, begins_unit=False) is None
    assert listening(PLAIN, values) is None, "a greedy choice is not drawn"
    made = DuplexSampling(TOKENS, VOCABULARY, 3, torch.device("cpu"))
    slots = [
        made.open(number, options, SeededUniforms(number))
        for number, options in enumerate((PLAIN, DRAWN, DRAWN))
    ]
    choices = made.choose(slots, values.expand(3, -1), [True, True, False])
    assert [choice.listen_probability is None for choice in choices] == [True, False, True]


def test_temperature_zero_takes_the_likeliest() -> None:
    made = Sampling(replace(PLAIN, decode_mode=DecodeMode.SAMPLING, temperature=0.0))
    assert choose(made, logits(id_5=0.1), [Listed(0.1, 0.99)])[0][0] == 5


def test_logits_that_are_not_finite_are_noticed() -> None:
    made = Sampling(PLAIN, PLAIN)
    values = torch.cat((logits(id_5=float("nan")), logits(id_6=1.0)))
    decisions = choose(made, values, slots=(0, 1))
    assert decisions[0][1] is Decision.NOT_FINITE
    assert decisions[1] == (6, Decision.CHOICE)


def test_a_slot_is_clean_after_reset() -> None:
    made = Sampling(PLAIN)
    choose(made, logits(id_5=8.0))
    assert not made.all.is_clean(0)
    made.all.reset(0)
    assert made.all.is_clean(0)


@given(
    st.lists(
        st.builds(
            ConversationOptions,
            decode_mode=st.sampled_from(DecodeMode),
            temperature=st.floats(0.1, 2),
            top_k=st.integers(0, 40),
            top_p=st.floats(0, 1),
            text_repetition_penalty=st.floats(0.8, 2),
            length_penalty=st.floats(0.5, 2),
            listen_top_k=st.none() | st.integers(0, 400),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**31),
)
def test_a_slot_chooses_the_same_alone_and_in_a_batch(
    options: list[ConversationOptions], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(3, len(options), VOCABULARY, generator=generator) * 4
    together = Sampling(*options)
    sources = [SeededUniforms(slot) for slot in range(len(options))]
    slots = list(range(len(options)))
    chosen = [together.choose(slots, step, sources) for step in steps]
    for slot, each in enumerate(options):
        alone, source = Sampling(each), SeededUniforms(slot)
        for step, decided in zip(steps, chosen, strict=True):
            assert alone.choose([0], step[slot : slot + 1], [source]) == [decided[slot]]
