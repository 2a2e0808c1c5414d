"""A stream that is resampled in pieces has no gap and loses no sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplane.fabric.audio import Samples, pcm_from_samples, resample
from duplane.fabric.resampler import Resampler, resampler

RATES = st.sampled_from([4_000, 8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000])
NOISE = np.random.default_rng(7).normal(0, 0.1, 20_000).astype(np.float32)
TOLERANCE = 1e-5


def samples(pcm: bytes) -> Samples:
    return np.frombuffer(pcm, "<f4")


def convert(stream: Resampler, sound: Samples, lengths: list[int]) -> list[Samples]:
    """Add the sound in pieces of the given lengths, and the rest in one piece."""
    cuts = np.cumsum([length for length in lengths if length <= sound.size])
    pieces = np.split(sound, cuts[cuts < sound.size])
    return [samples(stream.add(pcm_from_samples(piece))) for piece in pieces]


@given(RATES, RATES, st.lists(st.integers(0, 3_000), max_size=12))
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_length_give_the_whole_sound(
    before: int, after: int, lengths: list[int]
) -> None:
    stream = Resampler(before, after)
    pieces = convert(stream, NOISE, lengths)
    whole = np.concatenate([*pieces, samples(stream.end())])
    expected = resample(NOISE, before, after)
    assert abs(whole.size - NOISE.size * after / before) < 1
    length = min(whole.size, expected.size)
    assert np.abs(whole[:length] - expected[:length]).max() < TOLERANCE


@given(RATES, RATES, st.lists(st.integers(1, 3_000), max_size=12))
@settings(max_examples=60, deadline=None)
def test_prompt_stream_is_complete_after_each_piece(
    before: int, after: int, lengths: list[int]
) -> None:
    stream = Resampler(before, after, is_prompt=True)
    heard = 0
    given_count = 0
    for length in lengths:
        heard += length
        given_count += samples(stream.add(pcm_from_samples(NOISE[:length]))).size
        assert given_count == heard * after // before


def test_prompt_stream_of_an_hour_drifts_by_no_sample() -> None:
    stream = Resampler(44_100, 16_000, is_prompt=True)
    second = bytes(4 * 44_100)
    sizes = [samples(stream.add(second)).size for _ in range(3600)]
    assert sizes == [16_000] * 3600


@pytest.mark.parametrize("is_prompt", [False, True])
def test_streams_after_one_another_do_not_mix(*, is_prompt: bool) -> None:
    stream = Resampler(16_000, 24_000, is_prompt=is_prompt)
    first, second = (stream.add(pcm_from_samples(NOISE)) + stream.end() for _ in range(2))
    assert first == second


def test_tone_keeps_its_frequency_and_its_level() -> None:
    seconds = np.arange(16_000) / 16_000
    tone = (0.5 * np.sin(2 * np.pi * 440 * seconds)).astype(np.float32)
    stream = Resampler(16_000, 24_000)
    heard = np.concatenate([*convert(stream, tone, [1_280] * 12), samples(stream.end())])
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000)
    assert np.abs(heard - expected)[300:-300].max() < 1e-4


def test_equal_rates_need_no_resampler() -> None:
    assert resampler(16_000, 16_000) is None
    assert isinstance(resampler(16_000, 24_000), Resampler)
