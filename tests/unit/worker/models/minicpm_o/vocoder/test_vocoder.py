"""The vocoder with several slots: independence from the batch, turns, voices, resets and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.model.shapes import PLANNED, Shapes
from support.paths import GOLDEN
from support.speech import assert_sounds_equal

from duplane.worker.models.minicpm_o.vocoder.flow import MOVED_COLUMNS
from duplane.worker.models.minicpm_o.vocoder.flow_cache import move_columns
from duplane.worker.models.minicpm_o.vocoder.types import (
    VocoderChunk,
    VocoderError,
    VocoderOptions,
    VocoderVoice,
)
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder

pytestmark = pytest.mark.slow

FILES = GOLDEN / "token2wav"
SLOTS = 4
SAMPLES_PER_TOKEN = 960
HELD_BACK = 3840


def voice(seconds: float = 1.0, seed: int = 0) -> VocoderVoice:
    draw = np.random.default_rng(seed)
    tokens = int(seconds * 25)
    return VocoderVoice(
        draw.integers(0, 6561, tokens),
        draw.normal(-6.0, 2.0, (2 * tokens, 80)).astype(np.float32),
        draw.normal(size=192).astype(np.float32),
    )


def speech(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 6561, count).tolist()


def loaded(**options: object) -> Vocoder:
    settings = VocoderOptions(**{"max_prompt_frames": 150, **options})  # type: ignore[arg-type]  any option
    return Vocoder.load(FILES, slot_count=SLOTS, options=settings)


@pytest.fixture(scope="module")
def module_vocoder() -> Vocoder:
    return loaded(has_source_noise=False)


@pytest.fixture
def vocoder(module_vocoder: Vocoder) -> Vocoder:
    for slot in range(SLOTS):
        module_vocoder.reset(slot)
    return module_vocoder


def mels(vocoder: Vocoder, chunks: Sequence[VocoderChunk]) -> list[torch.Tensor]:
    """Decode one batch; return the mel of the flow model."""
    mel = vocoder.encode(chunks)
    vocoder.decode_mel(chunks, mel)
    return mel


@pytest.mark.parametrize("lengths", [(28, 28, 28, 28, 8), (8, 28)])
def test_chunks_that_are_repeated_leave_the_state_of_chunks_that_were_decoded(
    lengths: tuple[int, ...],
) -> None:
    vocoder = loaded()  # with noise in the source
    ended = VocoderChunk(0, speech(20, 8), is_last=True)
    parts = [speech(length, number) for number, length in enumerate(lengths)]
    for slot in (0, 1):
        vocoder.prime(slot, voice(), seed=3)
    vocoder.decode([ended])
    vocoder.start_turn(0)
    vocoder.decode([VocoderChunk(0, part, is_last=False) for part in parts])
    vocoder.skip([replace(ended, slot=1)])
    vocoder.start_turn(1)
    for number, part in enumerate(parts):
        vocoder.repeat(VocoderChunk(1, part, is_last=False), is_recent=number >= len(parts) - 2)
    for one, other in zip(vocoder.stream.state(0), vocoder.stream.state(1), strict=True):
        assert torch.equal(one, other)
    first, second = (
        vocoder.decode([VocoderChunk(slot, speech(28, 9), is_last=False)]) for slot in (0, 1)
    )
    assert np.array_equal(first[0], second[0])


# Four turns with different voices, chunk lengths and ends.
TURNS = [
    (voice(1.0, 1), [(28, False), (28, False), (28, False), (28, False), (9, True)]),
    (voice(2.4, 2), [(28, False), (14, False), (28, False), (28, True)]),
    (voice(0.4, 3), [(8, False), (28, False), (3, True)]),
    (voice(3.0, 4), [(12, False), (28, False), (28, False), (28, False), (28, False)]),
]


def chunk(slot: int, number: int) -> VocoderChunk:
    count, is_last = TURNS[slot][1][number]
    return VocoderChunk(slot, speech(count, 100 * slot + number), is_last)


def test_mel_does_not_depend_on_the_other_slots_of_the_batch(vocoder: Vocoder) -> None:
    alone: dict[tuple[int, int], torch.Tensor] = {}
    for slot, (own, turn) in enumerate(TURNS):
        vocoder.prime(slot, own)
        for number in range(len(turn)):
            alone[slot, number] = mels(vocoder, [chunk(slot, number)])[0]
        vocoder.reset(slot)
    for slot, (own, _) in enumerate(TURNS):
        vocoder.prime(slot, own)
    # Slots start one after the other, so each batch has chunks from different parts of turns.
    for tick in range(8):
        keys = [(s, tick - s) for s in range(SLOTS) if 0 <= tick - s < len(TURNS[s][1])]
        batch = [chunk(*key) for key in reversed(keys)]
        for key, mel in zip(reversed(keys), mels(vocoder, batch), strict=True):
            assert mel.shape == alone[key].shape
            assert (mel - alone[key]).abs().max() < 1e-5


def test_mel_does_not_depend_on_whether_slots_are_neighbours(vocoder: Vocoder) -> None:
    vocoder.prime(1, TURNS[1][0])
    alone = mels(vocoder, [chunk(1, 0)])[0]
    vocoder.start_turn(1)
    vocoder.prime(3, TURNS[3][0])
    together = mels(vocoder, [chunk(3, 0), chunk(1, 0)])[1]
    assert (together - alone).abs().max() < 1e-5


def test_samples_do_not_depend_on_the_other_slots_of_the_batch(vocoder: Vocoder) -> None:
    made = torch.tensor(np.random.default_rng(5).normal(-6.0, 2.0, (SLOTS, 2, 50, 80)).astype("f4"))
    calls = [[VocoderChunk(s, [0] * 28, is_last=bool(n)) for s in range(SLOTS)] for n in range(2)]
    results: list[list[np.ndarray]] = []
    for is_batched in (True, False):
        for slot in range(SLOTS):
            vocoder.prime(slot, voice())
        samples: list[np.ndarray] = []
        for number, chunks in enumerate(calls):
            if is_batched:
                samples += vocoder.decode_mel(chunks, list(made[:, number]))
            else:
                for slot, one in enumerate(chunks):
                    samples += vocoder.decode_mel([one], [made[slot, number]])
        results.append(samples)
    for batched, alone in zip(*results, strict=True):
        assert_sounds_equal(batched, alone)


def test_moves_of_many_frames_are_done_in_parts(
    vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in range(SLOTS):
        vocoder.prime(slot, voice(1.0, slot))
    chunks = [VocoderChunk(slot, speech(28, slot), is_last=False) for slot in range(SLOTS)]
    counts: list[int] = []

    def counted(cache: torch.Tensor, *moves: torch.Tensor) -> None:
        if cache is vocoder.live.estimator_attention:
            counts.append(moves[1].numel())
        move_columns(cache, *moves)

    monkeypatch.setattr("duplane.worker.models.minicpm_o.vocoder.flow.move_columns", counted)
    vocoder.encode(chunks)
    assert sum(counts) == SLOTS * 50
    assert max(counts) <= MOVED_COLUMNS < SLOTS * 50


def test_the_slots_of_one_estimator_layer_lie_together(vocoder: Vocoder) -> None:
    cache = vocoder.live.estimator_attention
    layer = cache[:, 0, 0, 0]
    extent = 1 + sum(
        (n - 1) * stride for n, stride in zip(layer.shape, layer.stride(), strict=True)
    )
    assert extent == layer.numel()


def test_two_turns_with_equal_tokens_have_equal_samples(vocoder: Vocoder) -> None:
    vocoder.prime(2, voice())
    calls = [VocoderChunk(2, speech(28, n), is_last=n == 4) for n in range(5)]
    first = vocoder.decode(calls)
    vocoder.start_turn(2)
    second = vocoder.decode(calls)
    for before, after in zip(first, second, strict=True):
        np.testing.assert_array_equal(before, after)


def test_chunks_of_one_slot_in_one_call_run_in_order(vocoder: Vocoder) -> None:
    calls = [VocoderChunk(0, speech(28, n), is_last=n == 1) for n in range(2)]
    vocoder.prime(0, voice())
    one_by_one = [vocoder.decode([call])[0] for call in calls]
    vocoder.start_turn(0)
    for together, single in zip(vocoder.decode(calls), one_by_one, strict=True):
        np.testing.assert_array_equal(together, single)


def test_the_number_of_samples_follows_from_the_decoded_tokens(vocoder: Vocoder) -> None:
    vocoder.prime(0, voice())
    first, middle, last = (
        vocoder.decode([VocoderChunk(0, speech(count, count), is_last)])[0]
        for count, is_last in ((28, False), (11, False), (3, True))
    )
    assert len(first) == 25 * SAMPLES_PER_TOKEN
    assert not first[:HELD_BACK].any()
    assert first[HELD_BACK:].any()
    assert len(middle) == 8 * SAMPLES_PER_TOKEN
    assert len(last) == 3 * SAMPLES_PER_TOKEN + HELD_BACK


def test_a_turn_of_one_token_has_samples(vocoder: Vocoder) -> None:
    vocoder.prime(0, voice())
    (samples,) = vocoder.decode([VocoderChunk(0, [7], is_last=True)])
    assert len(samples) == SAMPLES_PER_TOKEN
    assert np.isfinite(samples).all()


def test_a_long_turn_keeps_no_more_than_the_prompt_and_two_seconds(vocoder: Vocoder) -> None:
    vocoder.prime(0, voice(1.0))
    lengths: list[int] = []
    for number in range(6):
        vocoder.decode([VocoderChunk(0, speech(28, number), is_last=False)])
        lengths.append(vocoder.cached_frames(0))
    assert lengths == [100, 150, 150, 150, 150, 150]


def test_equal_seeds_give_equal_samples_and_other_seeds_do_not() -> None:
    vocoder = loaded()
    samples: list[np.ndarray] = []
    for slot, seed in ((0, 5), (1, 5), (2, 6)):
        vocoder.prime(slot, voice(), seed=seed)
        samples.append(vocoder.decode([VocoderChunk(slot, speech(28, 1), is_last=True)])[0])
    np.testing.assert_array_equal(samples[0], samples[1])
    assert np.abs(samples[0] - samples[2]).max() > 0


def test_a_reset_removes_the_voice_and_zeroes_the_state(vocoder: Vocoder) -> None:
    neighbour = voice(1.0, 8)
    vocoder.prime(0, neighbour)
    vocoder.prime(1, voice())
    vocoder.decode([VocoderChunk(1, speech(28, n), is_last=False) for n in range(3)])
    assert not vocoder.is_clean(1)
    vocoder.reset(1)
    assert vocoder.is_clean(1)
    assert not vocoder.is_clean(0)
    with pytest.raises(VocoderError, match="slot 1 has no turn"):
        vocoder.decode([VocoderChunk(1, speech(28, 1), is_last=False)])
    with pytest.raises(VocoderError, match="slot 1 has no voice"):
        vocoder.start_turn(1)


def test_rendering_a_whole_utterance_changes_no_slot(vocoder: Vocoder) -> None:
    mel = vocoder.render_mel(voice(), speech(10, 1))
    assert mel.shape == (20, 80)
    assert all(vocoder.is_clean(slot) for slot in range(SLOTS))


@pytest.mark.slow
def test_a_voice_that_was_evicted_from_the_cache_gives_the_same_samples(vocoder: Vocoder) -> None:
    few = loaded(has_source_noise=False, cached_voices=2)
    assert len(few.base.speaker) == 2
    voices = [voice(1.0, seed) for seed in range(3)]
    tokens = speech(28, 1)
    for one in (vocoder, few):
        for slot, own in enumerate(voices):
            one.prime(slot, own)
        one.prime(3, voices[0])
        one.render_mel(voices[2], tokens)
        for slot in range(SLOTS):
            one.start_turn(slot)
    for slot in range(SLOTS):
        call = [VocoderChunk(slot, tokens, is_last=False)]
        np.testing.assert_array_equal(vocoder.decode(call)[0], few.decode(call)[0])
    few.start_turn(0)
    assert few.cached_frames(0) == 50


@pytest.mark.parametrize("count", [1, 10, 49, 50, 51, 74, 75])
def test_a_prompt_that_is_padded_to_a_bucket_leaves_the_same_state(
    vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    states: list[list[torch.Tensor]] = []
    rendered: list[torch.Tensor] = []
    for has_buckets in (False, True):
        monkeypatch.setattr(vocoder.stream, "has_buckets", has_buckets)
        for seed in range(SLOTS):  # evicts the prompt of the first pass
            vocoder.prime(1, voice(2.8, seed))
        vocoder.reset(0)
        vocoder.prime(0, voice(count / 25, 4))
        states.append([tensor[0].clone() for tensor in vocoder.live.tensors])
        rendered.append(vocoder.render_mel(voice(count / 25, 4), speech(75 - count, 1)))
    for got, want in zip(states[1], states[0], strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(rendered[1], rendered[0], atol=2e-4, rtol=1e-4)


@pytest.mark.slow
def test_no_prompt_meets_a_new_shape_after_the_warm_up(
    vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocoder.stream, "has_buckets", True)
    with Shapes(*PLANNED) as warm:
        vocoder.warm_up()
    assert all(vocoder.is_clean(slot) for slot in range(SLOTS))
    with Shapes(*PLANNED) as running:
        for count in (1, 2, 30, 49, 50, 51, 60, 74, 75):
            vocoder.prime(0, voice(count / 25, count))
    assert len(running.found) > 20
    assert running.found - warm.found == set()


def test_slots_with_the_same_voice_share_its_prompt(
    vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = voice(1.0, 11)
    calls: list[int] = []
    forward = vocoder.flow.forward

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return forward(*arguments)

    monkeypatch.setattr(vocoder.flow, "forward", counted)
    for slot in range(SLOTS):
        vocoder.prime(slot, VocoderVoice(**{k: v.copy() for k, v in own.__dict__.items()}))
        vocoder.start_turn(slot)
    assert len(calls) == 1


def test_a_voice_that_is_too_long_is_refused(vocoder: Vocoder) -> None:
    with pytest.raises(VocoderError, match=r"152 mel frames, more than max_prompt_frames 150"):
        vocoder.prime(0, voice(76 / 25))
    assert vocoder.is_clean(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": np.zeros(0, np.int64)}, "prompt_tokens is empty"),
        ({"prompt_tokens": np.full(25, 6561)}, "no such speech tokens: .6561"),
        ({"prompt_mel": np.zeros((49, 80), np.float32)}, r"prompt_mel has shape .49, 80"),
        ({"prompt_mel": np.full((50, 80), np.nan, np.float32)}, "prompt_mel .* not finite"),
        ({"speaker_embedding": np.zeros(80, np.float32)}, "speaker_embedding has shape"),
    ],
)
def test_a_voice_whose_parts_do_not_fit_together_is_refused(
    vocoder: Vocoder, change: dict[str, np.ndarray], message: str
) -> None:
    good = voice()
    with pytest.raises(VocoderError, match=message):
        vocoder.prime(0, VocoderVoice(**{**good.__dict__, **change}))
    assert vocoder.is_clean(0)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([(29, False)], "29 tokens, at most 28"),
        ([(6, False)], "6 tokens, at least 7"),
        ([(0, True)], "0 tokens, at least 1"),
        ([(28, False), (3, False)], "3 tokens, at least 4"),
        ([(28, True), (28, False)], "a chunk follows the last of its turn"),
    ],
)
def test_an_invalid_chunk_is_refused_and_changes_nothing(
    vocoder: Vocoder, chunks: list[tuple[int, bool]], message: str
) -> None:
    vocoder.prime(0, voice())
    before = [tensor.clone() for tensor in vocoder.live.tensors]
    calls = [VocoderChunk(0, speech(count, count), is_last) for count, is_last in chunks]
    with pytest.raises(VocoderError, match=message):
        vocoder.decode(calls)
    for tensor, was in zip(vocoder.live.tensors, before, strict=True):
        assert torch.equal(tensor, was)
    assert len(vocoder.decode([VocoderChunk(0, speech(28, 1), is_last=False)])[0]) == 24_000


def test_an_unknown_token_is_refused(vocoder: Vocoder) -> None:
    vocoder.prime(0, voice())
    with pytest.raises(VocoderError, match=r"slot 0: no such speech tokens: .6561"):
        vocoder.decode([VocoderChunk(0, [6561] * 28, is_last=False)])


def test_a_noise_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(VocoderError, match=r"noise has shape .10, 80"):
        loaded(noise=torch.zeros(10, 80))


def test_memory_counts_weights_and_state(vocoder: Vocoder) -> None:
    state = sum(t.nbytes for caches in (vocoder.base, vocoder.live) for t in caches.tensors)
    weights = sum(p.nbytes for p in vocoder.flow.parameters())
    assert vocoder.memory_bytes > state + weights
