"""The token buffer of a turn, and the padding and quantisation of a unit's samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.worker.models.minicpm_o.duplex.speech import unit_audio
from duplane.worker.models.minicpm_o.vocoder.token_buffer import SpeechTokens, TokenChunk

SILENCE, LOOKAHEAD, WINDOW = 9, 3, 25

units = st.lists(st.lists(st.integers(10, 6560), max_size=60), min_size=1, max_size=8)


def buffer() -> SpeechTokens:
    return SpeechTokens(silence_token_id=SILENCE, lookahead=LOOKAHEAD, window=WINDOW)


def decoded(chunk: TokenChunk) -> tuple[int, ...]:
    """Return the tokens of a chunk without its lookahead."""
    return chunk.tokens if chunk.is_last else chunk.tokens[:-LOOKAHEAD]


def test_the_25_tokens_of_a_unit_and_the_prefix_fill_one_chunk() -> None:
    tokens = list(range(100, 125))
    (chunk,) = buffer().push(tokens, end_of_turn=False)
    assert chunk == TokenChunk((SILENCE,) * 3 + tuple(tokens), is_last=False)


def test_too_few_tokens_for_a_chunk_stay_in_the_buffer() -> None:
    tokens = buffer()
    assert tokens.push([1, 2, 3, 4], end_of_turn=False) == []
    assert tokens.pending == (SILENCE, SILENCE, SILENCE, 1, 2, 3, 4)


def test_a_turn_without_tokens_flushes_its_prefix() -> None:
    (chunk,) = buffer().push([], end_of_turn=True)
    assert chunk == TokenChunk((SILENCE,) * 3, is_last=True)


@given(units)
def test_every_token_of_a_turn_is_decoded_once_and_in_order(turn: list[list[int]]) -> None:
    tokens = buffer()
    chunks = [
        chunk
        for number, unit in enumerate(turn)
        for chunk in tokens.push(unit, end_of_turn=number == len(turn) - 1)
    ]
    expected = [SILENCE] * 3 + [token for unit in turn for token in unit]
    assert [token for chunk in chunks for token in decoded(chunk)] == expected


@given(units)
def test_only_the_end_of_a_turn_makes_a_last_chunk(turn: list[list[int]]) -> None:
    tokens = buffer()
    for unit in turn:
        assert not any(chunk.is_last for chunk in tokens.push(unit, end_of_turn=False))
    chunks = tokens.push([], end_of_turn=True)
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@given(units)
def test_chunks_have_at_least_eight_and_at_most_28_tokens(turn: list[list[int]]) -> None:
    tokens = buffer()
    for unit in turn:
        for chunk in tokens.push(unit, end_of_turn=False):
            assert LOOKAHEAD + 5 <= len(chunk.tokens) <= WINDOW + LOOKAHEAD
        assert len(tokens.pending) < LOOKAHEAD + 5


@given(units)
def test_a_turn_end_and_a_reset_leave_only_the_prefix(turn: list[list[int]]) -> None:
    ended, stopped = buffer(), buffer()
    for unit in turn:
        ended.push(unit, end_of_turn=True)
        stopped.push(unit, end_of_turn=False)
    stopped.reset()
    assert ended.pending == stopped.pending == (SILENCE,) * 3


@pytest.mark.parametrize(
    ("sample", "quantised"),
    [(0.0, 0), (1.0, 32767), (-1.0, -32767), (2.0, 32767), (1.9 / 32767, 1), (-1.9 / 32767, -1)],
)
def test_samples_are_clipped_scaled_and_truncated(sample: float, quantised: int) -> None:
    result = unit_audio([np.array([sample], np.float32)], end_of_turn=True)
    assert result.dtype == np.float32
    assert result[0] == quantised / 32768


def test_short_speech_inside_a_turn_is_padded_on_the_left() -> None:
    speech = unit_audio([np.full(10, 0.5, np.float32)], end_of_turn=False)
    assert len(speech) == 24_000
    assert not speech[:-10].any()
    assert (speech[-10:] > 0.49).all()


def test_the_last_speech_of_a_turn_is_not_padded() -> None:
    pieces = [np.full(10, 0.5, np.float32), np.full(5, 0.25, np.float32)]
    assert len(unit_audio(pieces, end_of_turn=True)) == 15


def test_a_unit_without_speech_has_no_samples() -> None:
    assert len(unit_audio([], end_of_turn=False)) == 0
