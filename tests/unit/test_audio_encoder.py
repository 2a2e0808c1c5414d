from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duplane.worker.model.audio_clip import BATCH_FRAMES, Piece, batches, cut, split
from duplane.worker.model.audio_encoder import AudioEncoder
from duplane.worker.model.checkpoint import CheckpointError
from duplane.worker.model.whisper import AudioConfig

CONFIG = AudioConfig(
    mel_bins=80,
    width=32,
    layer_count=2,
    head_count=4,
    ffn_width=64,
    position_count=1500,
    hidden=48,
    pool=5,
    chunk_positions=50,
)


def build(config: AudioConfig = CONFIG, slot_count: int = 1, **kwargs: object) -> AudioEncoder:
    encoder = AudioEncoder(config, slot_count, **kwargs)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoder.parameters():
            values = torch.randn(parameter.shape, generator=random)
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 25
            parameter.copy_(values / fan_in**0.5)
    return encoder


def noise(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, count).astype(np.float32)


def run(encoder: AudioEncoder, slot: int, units: list[np.ndarray]) -> list[torch.Tensor]:
    rows: list[torch.Tensor] = []
    for unit in units:
        assert encoder.push(slot, unit)
        rows.append(encoder.encode([slot])[0])
    return rows


def test_slots_with_caches_of_different_lengths_give_what_each_gives_alone() -> None:
    signals = [[noise(10 * slot + unit, 16000) for unit in range(9)] for slot in range(4)]
    alone = [run(build(), 0, signal) for signal in signals]
    encoder, delays = build(slot_count=4), [3, 0, 8, 5]
    for tick in range(9):
        slots = [slot for slot in (3, 1, 0, 2) if tick >= delays[slot]]
        for slot in slots:
            assert encoder.push(slot, signals[slot][tick - delays[slot]])
        for slot, row in zip(slots, encoder.encode(slots), strict=True):
            torch.testing.assert_close(row, alone[slot][tick - delays[slot]], atol=1e-5, rtol=0)


def test_a_unit_gives_ten_embeddings_and_fifty_positions() -> None:
    encoder = build()
    (row,) = run(encoder, 0, [noise(0, 16000)])
    assert row.shape == (10, CONFIG.hidden)
    assert encoder.unit_rows == 10
    assert encoder.cache_length(0) == 50


def test_the_cache_starts_anew_before_it_would_overflow() -> None:
    encoder = build(replace(CONFIG, position_count=250))
    lengths: list[int] = []
    for unit in range(9):
        run(encoder, 0, [noise(unit, 16000)])
        lengths.append(encoder.cache_length(0))
    assert lengths == [50, 100, 150, 200, 50, 100, 150, 200, 50]


def test_after_the_cache_started_anew_the_old_one_is_not_seen() -> None:
    config = replace(CONFIG, position_count=102)  # two units fit, but not their context
    first, second = build(config), build(config)
    units = [noise(unit, 16000) for unit in range(2)]
    run(first, 0, units)
    run(second, 0, units)
    second.cache.fill_(7.0)
    tail = noise(9, 16000)
    torch.testing.assert_close(run(first, 0, [tail])[0], run(second, 0, [tail])[0])


def test_a_reset_slot_is_clean_gives_the_same_again_and_leaves_its_neighbour_alone() -> None:
    units = [noise(unit, 16000) for unit in range(4)]
    encoder = build(slot_count=2)
    before = run(encoder, 0, units)
    neighbour = run(encoder, 1, units[:2])
    assert not encoder.is_clean(0)
    encoder.reset(0)
    assert encoder.is_clean(0)
    assert encoder.cache_length(0) == encoder.buffered(0) == 0
    for old, new in zip(before, run(encoder, 0, units), strict=True):
        assert torch.equal(old, new)
    neighbour += run(encoder, 1, units[2:])
    for old, new in zip(before, neighbour, strict=True):
        assert torch.equal(old, new)


def test_all_state_is_allocated_at_construction() -> None:
    encoder = build(slot_count=2)
    before = [buffer.data_ptr() for buffer in encoder.buffers()]
    run(encoder, 0, [noise(unit, 16000) for unit in range(33)])
    encoder.reset(0)
    assert [buffer.data_ptr() for buffer in encoder.buffers()] == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32(dtype: torch.dtype) -> None:
    exact, half = build(), build(dtype=dtype)
    half.load_state_dict(exact.state_dict())
    units = [noise(unit, 16000) for unit in range(3)]
    for want, got in zip(run(exact, 0, units), run(half, 0, units), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0)
    assert half.mel.samples.dtype == torch.float32
    assert half.encode_clip(units[0]).dtype == dtype


def test_a_clips_early_seconds_do_not_depend_on_later_ones() -> None:
    encoder, clip = build(), noise(5, 48000)
    # Equal loudness before and after keeps the normalisation of both clips the same.
    clip[0] = 1.0
    other = clip.copy()
    other[33000:] = noise(6, 15000) * 0.5
    ours, theirs = encoder.encode_clip(clip), encoder.encode_clip(other)
    torch.testing.assert_close(ours[:20], theirs[:20], atol=1e-5, rtol=0)
    assert not torch.allclose(ours[20:], theirs[20:], atol=1e-3)


def test_a_clip_of_thirty_seconds_is_one_piece_and_a_longer_one_is_split() -> None:
    clip = noise(7, 480001)
    assert [len(piece) for piece in split(CONFIG, clip[:-1])] == [480000]
    assert [len(piece) for piece in split(CONFIG, clip)] == [480000, 1]
    small = replace(CONFIG, position_count=250)
    assert [len(piece) for piece in split(small, clip[:200000])] == [80000, 80000, 40000]
    assert build(small).encode_clip(clip[:200000]).shape == (125, CONFIG.hidden)


@pytest.mark.parametrize("is_blockwise", [True, False])
def test_batches_of_any_make_give_what_one_batch_of_all_pieces_gives(is_blockwise: bool) -> None:
    encoder = build()
    seconds = (0.11, 1.5, 31.0, 0.09, 7.03, 0.11, 0.31, 2.0)
    clips = [noise(index, int(16000 * length)) for index, length in enumerate(seconds)]
    groups = cut(CONFIG, clips, is_blockwise=is_blockwise)
    pieces = [piece for group in groups for piece in group]
    longest = max(piece.frames for piece in pieces)

    def encode(*made: Sequence[Piece]) -> list[Tensor]:
        found = (encoder.encode_pieces(batch, is_blockwise=is_blockwise) for batch in made)
        return [rows for batch in found for rows in batch]

    together = encode([replace(piece, padded_frames=longest) for piece in pieces])
    for got in (encode(*batches(pieces)), encode(*([piece] for piece in pieces))):
        for ours, theirs in zip(got, together, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@given(st.lists(st.integers(1, 600_000), max_size=12))
def test_no_batch_is_more_than_one_long_piece_and_none_is_left_out(lengths: list[int]) -> None:
    groups = cut(CONFIG, [np.zeros(length, np.float32) for length in lengths])
    pieces = [piece for group in groups for piece in group]
    made = list(batches(pieces))
    assert [piece for batch in made for piece in batch] == pieces
    for batch in made:
        widest = max(piece.padded_frames for piece in batch)
        assert len(batch) * widest <= BATCH_FRAMES


@pytest.mark.parametrize("count", [0, 1, 1280])
def test_a_clip_too_short_for_an_embedding_gives_none(count: int) -> None:
    assert build().encode_clip(noise(8, count)).shape == (0, CONFIG.hidden)


def test_a_clip_touches_no_slot() -> None:
    encoder = build(slot_count=1)
    encoder.encode_clip(noise(9, 20000))
    assert encoder.is_clean(0)


def test_a_clip_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        build().encode_clip(np.full(16000, np.nan, np.float32))


def test_a_position_table_too_short_for_a_unit_is_refused() -> None:
    with pytest.raises(CheckpointError, match="max_source_positions: 49"):
        replace(CONFIG, position_count=49)
