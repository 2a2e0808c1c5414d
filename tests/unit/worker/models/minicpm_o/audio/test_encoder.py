"""The audio encoder: live units in slots, and whole clips in segments."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.model.shapes import PLANNED, Shapes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from duplane.worker.models.minicpm_o.audio.clip import (
    BATCH_FRAMES,
    ClipSegment,
    batches,
    clip_buckets,
    split_clips,
    split_samples,
)
from duplane.worker.models.minicpm_o.audio.encoder import AudioEncoder
from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig
from duplane.worker.models.minicpm_o.batch_sizes import padded_length
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError

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
    encoder = AudioEncoder(config, slot_count, **kwargs)  # type: ignore[arg-type]  any option
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoder.parameters():
            values = torch.randn(parameter.shape, generator=random)
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 25
            parameter.copy_(values / fan_in**0.5)
    return encoder


def noise(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, count).astype(np.float32)


def push(encoder: AudioEncoder, slot: int, unit: np.ndarray) -> None:
    assert encoder.mel.push(slot, unit)
    encoder.mel.take(slot)


def run(encoder: AudioEncoder, slot: int, units: list[np.ndarray]) -> list[torch.Tensor]:
    rows: list[torch.Tensor] = []
    for unit in units:
        push(encoder, slot, unit)
        rows.append(encoder.encode([slot])[0])
    return rows


def test_embeddings_do_not_depend_on_the_other_slots() -> None:
    signals = [[noise(10 * slot + unit, 16000) for unit in range(9)] for slot in range(4)]
    alone = [run(build(), 0, signal) for signal in signals]
    encoder = build(slot_count=4)
    delays = [3, 0, 8, 5]
    for tick in range(9):
        slots = [slot for slot in (3, 1, 0, 2) if tick >= delays[slot]]
        for slot in slots:
            push(encoder, slot, signals[slot][tick - delays[slot]])
        for slot, row in zip(slots, encoder.encode(slots), strict=True):
            torch.testing.assert_close(row, alone[slot][tick - delays[slot]], atol=1e-5, rtol=0)


def test_a_run_of_units_gives_the_same_embeddings_and_cache_in_fewer_passes() -> None:
    config = replace(CONFIG, position_count=300)  # the cache starts again after five units
    units = [noise(unit, 16000) for unit in range(13)]
    one_by_one, together = build(config, 2), build(config, 2)
    alone = torch.stack(run(one_by_one, 1, units))
    found: list[Tensor] = []
    for part in (units[:1], units[1:3], units[3:]):
        features: list[tuple[Tensor, list[bool]]] = []
        for unit in part:
            push(together, 1, unit)
            features.append(together.mel.features([1]))
        found.append(together.encode_run(1, features))
    torch.testing.assert_close(torch.cat(found), alone, atol=1e-5, rtol=0)
    assert together.cache_length(1) == one_by_one.cache_length(1) == 150
    # When the cache starts again, it overwrites only the columns that it needs. The columns beyond
    # its length keep the values of earlier units, which must also be equal.
    torch.testing.assert_close(together.cache, one_by_one.cache, atol=1e-5, rtol=0)


class LargestResult(TorchDispatchMode):
    """Records the size of the largest tensor that any operation allocates. Views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.element_count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)]
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in inputs:
            self.element_count = max(self.element_count, result.numel())
        return result


def test_the_cache_of_neighbouring_slots_is_read_in_place() -> None:
    encoder = build(slot_count=3)
    largest = LargestResult()
    for unit in range(20):
        for slot in range(3):
            push(encoder, slot, noise(unit, 16000))
        with largest:
            encoder.encode([0, 1, 2])
    keys_and_values = 2 * 3 * encoder.cache_length(0) * CONFIG.width
    assert encoder.cache_length(0) == 1000
    assert largest.element_count < keys_and_values


def test_a_unit_has_ten_embeddings_and_fifty_positions() -> None:
    encoder = build()
    (row,) = run(encoder, 0, [noise(0, 16000)])
    assert row.shape == (10, CONFIG.hidden)
    assert encoder.unit_rows == 10
    assert encoder.cache_length(0) == 50


def test_the_cache_restarts_before_it_overflows() -> None:
    encoder = build(replace(CONFIG, position_count=250))
    lengths: list[int] = []
    for unit in range(9):
        run(encoder, 0, [noise(unit, 16000)])
        lengths.append(encoder.cache_length(0))
    assert lengths == [50, 100, 150, 200, 50, 100, 150, 200, 50]


def test_after_a_restart_earlier_cache_contents_have_no_effect() -> None:
    config = replace(CONFIG, position_count=102)  # room for two units without context
    first, second = build(config), build(config)
    units = [noise(unit, 16000) for unit in range(2)]
    run(first, 0, units)
    run(second, 0, units)
    second.cache.fill_(7.0)
    tail = noise(9, 16000)
    torch.testing.assert_close(run(first, 0, [tail])[0], run(second, 0, [tail])[0])


def test_a_reset_slot_repeats_its_results_and_does_not_change_its_neighbour() -> None:
    units = [noise(unit, 16000) for unit in range(4)]
    encoder = build(slot_count=2)
    before = run(encoder, 0, units)
    neighbour = run(encoder, 1, units[:2])
    assert not encoder.is_clean(0)
    encoder.reset(0)
    assert encoder.is_clean(0)
    assert encoder.cache_length(0) == encoder.mel.buffered(0) == 0
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
def test_half_precision_is_close_to_float32(dtype: torch.dtype) -> None:
    exact, half = build(), build(dtype=dtype)
    half.load_state_dict(exact.state_dict())
    units = [noise(unit, 16000) for unit in range(3)]
    for want, got in zip(run(exact, 0, units), run(half, 0, units), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0)
    assert half.mel.samples.dtype == torch.float32
    assert half.encode_clip(units[0]).dtype == dtype


def test_the_first_seconds_of_a_clip_do_not_depend_on_later_ones() -> None:
    encoder = build()
    clip = noise(5, 48000)
    # Both clips begin with the same loudest sample, so their normalisation is the same.
    clip[0] = 1.0
    other = clip.copy()
    other[33000:] = noise(6, 15000) * 0.5
    ours, theirs = encoder.encode_clip(clip), encoder.encode_clip(other)
    torch.testing.assert_close(ours[:20], theirs[:20], atol=1e-5, rtol=0)
    assert not torch.allclose(ours[20:], theirs[20:], atol=1e-3)


def test_a_clip_longer_than_thirty_seconds_is_split() -> None:
    clip = noise(7, 480001)
    assert [len(segment) for segment in split_samples(CONFIG, clip[:-1])] == [480000]
    assert [len(segment) for segment in split_samples(CONFIG, clip)] == [480000, 1]
    small = replace(CONFIG, position_count=250)
    assert [len(segment) for segment in split_samples(small, clip[:200000])] == [
        80000,
        80000,
        40000,
    ]
    assert build(small).encode_clip(clip[:200000]).shape == (125, CONFIG.hidden)


@pytest.mark.parametrize("is_blockwise", [True, False])
def test_embeddings_of_segments_do_not_depend_on_the_batch(is_blockwise: bool) -> None:
    encoder = build()
    seconds = (0.11, 1.5, 31.0, 0.09, 7.03, 0.11, 0.31, 2.0)
    clips = [noise(index, int(16000 * length)) for index, length in enumerate(seconds)]
    groups = split_clips(CONFIG, clips, is_blockwise=is_blockwise)
    segments = [segment for group in groups for segment in group]
    longest = max(segment.frames for segment in segments)

    def encode(*grouped: Sequence[ClipSegment]) -> list[Tensor]:
        found = (encoder.encode_segments(batch, is_blockwise=is_blockwise) for batch in grouped)
        return [rows for batch in found for rows in batch]

    together = encode([replace(segment, padded_frames=longest) for segment in segments])
    for has_buckets in (False, True):
        encoder.has_buckets = has_buckets
        alone = encode(*([segment] for segment in segments))
        for got in (encode(*encoder.batches(segments)), alone):
            for ours, theirs in zip(got, together, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_blockwise", [True, False])
@pytest.mark.parametrize("count", [8_321, 16_000, 30_081, 47_999, 250_241])
def test_a_clip_that_is_padded_to_a_bucket_has_the_same_embeddings(
    count: int, is_blockwise: bool
) -> None:
    """The reference pads a clip alone to no more than its own length, which may be odd."""
    encoder = build()
    ((segment,),) = split_clips(CONFIG, [noise(1, count)], is_blockwise=is_blockwise)
    assert segment.padded_frames not in clip_buckets(CONFIG)
    (want,) = encoder.encode_segments([segment], is_blockwise=is_blockwise)
    encoder.has_buckets = True
    (got,) = encoder.encode_segments([segment], is_blockwise=is_blockwise)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_no_clip_meets_a_new_shape_after_the_warm_up() -> None:
    encoder = build()
    encoder.has_buckets = True
    with Shapes(*PLANNED) as warm:
        encoder.warm_up()
    assert encoder.is_clean(0)
    draw = random.Random(0)
    with Shapes(*PLANNED) as running:
        for seconds in (0.1, 1.0, 3.3, 9.99, 10.0, 17.0, 29.0, 30.0, 31.7):
            encoder.encode_clip(noise(1, int(16_000 * seconds)))
        clips = [noise(1, int(16_000 * draw.uniform(0.1, 8))) for _ in range(60)]
        segments = [segment for group in split_clips(CONFIG, clips) for segment in group]
        for batch in encoder.batches(segments):
            encoder.encode_segments(batch)
    assert len(running.found) > 50
    assert running.found - warm.found == set()


@pytest.mark.parametrize("buckets", [(), clip_buckets(CONFIG)])
@given(lengths=st.lists(st.integers(1, 600_000), max_size=12))
def test_batches_are_bounded_and_contain_every_segment(
    lengths: list[int], buckets: Sequence[int]
) -> None:
    groups = split_clips(CONFIG, [np.zeros(length, np.float32) for length in lengths])
    segments = [segment for group in groups for segment in group]
    grouped = list(batches(segments, buckets))
    assert [segment for batch in grouped for segment in batch] == segments
    for batch in grouped:
        widest = padded_length(max(segment.padded_frames for segment in batch), buckets)
        assert len(batch) * widest <= BATCH_FRAMES


@pytest.mark.parametrize("count", [0, 1, 1280])
def test_a_clip_too_short_for_an_embedding_has_none(count: int) -> None:
    assert build().encode_clip(noise(8, count)).shape == (0, CONFIG.hidden)


def test_encoding_a_clip_changes_no_slot() -> None:
    encoder = build(slot_count=1)
    encoder.encode_clip(noise(9, 20000))
    assert encoder.is_clean(0)


def test_a_clip_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        build().encode_clip(np.full(16000, np.nan, np.float32))


def test_a_position_table_too_short_for_a_unit_is_refused() -> None:
    with pytest.raises(CheckpointError, match="max_source_positions: 49"):
        replace(CONFIG, position_count=49)
