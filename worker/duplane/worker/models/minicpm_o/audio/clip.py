"""Encodes whole clips (voices, and the sounds of chats) to embeddings, without caches.

A clip is split into segments of 30 s, or of less if the encoder's position table is shorter. Within
a segment, each one-second block attends to itself and to the blocks before it.
Source: `MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from duplane.worker.models.minicpm_o.audio.mel import HISTORY_SAMPLES, HOP, LogMel
from duplane.worker.models.minicpm_o.audio.whisper import (
    AudioConfig,
    AudioProjector,
    WhisperEncoder,
)
from duplane.worker.models.minicpm_o.batch_sizes import padded_length, padded_size, padded_sizes
from duplane.worker.models.minicpm_o.transfer import upload

BATCH_FRAMES = HISTORY_SAMPLES // HOP
"""Maximum number of mel frames of one batch, including the padding of its segments: as many as the
longest segment has. Repeated rows, up to one of the `padded_sizes`, do not count."""
BUCKETS = 6
"""Number of widths to which batches can be padded."""


@dataclass(frozen=True, eq=False)
class ClipSegment:
    """A part of a clip that is encoded separately, to `rows` embeddings.

    The segment has `frames` mel frames. It is padded to `padded_frames`, which affects the result.
    """

    samples: np.ndarray
    frames: int
    padded_frames: int
    rows: int


def split_clips(
    config: AudioConfig, clips: Sequence[np.ndarray], *, is_blockwise: bool = True
) -> list[list[ClipSegment]]:
    """Split each of several 16 kHz clips [n] into segments.

    The reference pads all segments to the longest one and encodes them in one batch. A shorter
    segment attends to some of its padding (see `block_mask`), so its result depends on the padding.
    Here each segment is padded as far as the reference lets it attend. So the result is the same,
    and does not depend on the batch. If not `is_blockwise`, all positions of a segment attend to
    each other. Raises ValueError for samples that are not one-dimensional or not finite.
    """
    for samples in clips:
        if samples.ndim != 1 or not np.isfinite(samples).all():
            raise ValueError("audio: expected one row of finite samples")
    parts = [split_samples(config, samples) for samples in clips]
    longest = max((frames_of(len(part)) for group in parts for part in group), default=0)
    block = config.chunk_positions if is_blockwise else 0
    return [[_segment(config, part, block, longest) for part in group] for group in parts]


def _segment(config: AudioConfig, samples: np.ndarray, block: int, longest: int) -> ClipSegment:
    frames = frames_of(len(samples))
    seen = frames if block == 0 else -(-((frames + 1) // 2) // block) * block
    return ClipSegment(samples, frames, min(2 * seen, longest), rows_of(frames, config.pool))


def clip_buckets(config: AudioConfig) -> list[int]:
    """Return the numbers of mel frames to which segments can be padded, ascending.

    The last one is that of the longest segment; each other one is half of the next.
    """
    longest = frames_of(_segment_samples(config))
    return [-(-longest // (1 << power)) for power in reversed(range(BUCKETS))]


def batches(
    segments: Sequence[ClipSegment], buckets: Sequence[int] = ()
) -> Iterator[Sequence[ClipSegment]]:
    """Group segments, in order, into batches of at most `BATCH_FRAMES` frames.

    The frames include the padding up to one of `buckets`.
    """
    start, widest = 0, 0
    for index, segment in enumerate(segments):
        frames = padded_length(segment.padded_frames, buckets)
        widest = max(widest, frames)
        if start < index and (index + 1 - start) * widest > BATCH_FRAMES:
            yield segments[start:index]
            start, widest = index, frames
    if start < len(segments):
        yield segments[start:]


def warm_up_batches(config: AudioConfig) -> Iterator[Sequence[ClipSegment]]:
    """Yield a batch of silence for each padded size of the batches that `batches` can return."""
    for frames in clip_buckets(config):
        samples = np.zeros(frames * HOP, np.float32)
        segment = ClipSegment(samples, frames, frames, rows_of(frames, config.pool))
        for count in padded_sizes(BATCH_FRAMES // frames):
            yield [segment] * count


def encode_batch(
    apm: WhisperEncoder,
    projector: AudioProjector,
    log_mel: LogMel,
    segments: Sequence[ClipSegment],
    buckets: Sequence[int] = (),
    *,
    is_blockwise: bool = True,
) -> list[Tensor]:
    """Return the embeddings [rows, hidden] of each segment of one batch.

    `is_blockwise` must have the same value as for `split_clips`. If there are `buckets`, the batch
    is padded to one of them and to one of the `padded_sizes`. This does not change the result.
    """
    parameter = apm.conv1.weight
    if not any(segment.rows for segment in segments):
        none = torch.zeros((0, apm.config.hidden), device=parameter.device, dtype=parameter.dtype)
        return [none for _ in segments]
    width = padded_length(max(segment.padded_frames for segment in segments), buckets)
    clips = [log_mel.clip(segment.samples) for segment in segments]
    batch = list(segments)
    ends = None
    if buckets:
        padding = padded_size(len(batch)) - len(batch)
        batch, clips = batch + batch[:1] * padding, clips + clips[:1] * padding
        ends = upload([segment.padded_frames for segment in batch], parameter.device)
    features = pad_sequence(clips, batch_first=True)
    features = torch.nn.functional.pad(features, (0, 0, 0, width - features.shape[1]))
    hidden = apm.convolve(features, None, ends)
    positions = hidden.shape[1]
    hidden = hidden + apm.embed_positions.weight[:positions]
    block = apm.config.chunk_positions if is_blockwise else 0
    seen = [min(segment.frames, (segment.padded_frames + 1) // 2) for segment in batch]
    mask = upload(block_mask(seen, positions, block), hidden.device)
    for layer in apm.layers:
        hidden = layer(hidden, mask)
    embeds = projector(apm.layer_norm(hidden))
    return [rows[: segment.rows] for rows, segment in zip(embeds, segments, strict=False)]


def split_samples(config: AudioConfig, samples: np.ndarray) -> list[np.ndarray]:
    """Split the samples of a clip into the samples of its segments."""
    length = _segment_samples(config)
    return [samples[start : start + length] for start in range(0, len(samples), length)]


def clip_rows(config: AudioConfig, sample_count: int) -> int:
    """Return the number of embeddings of a clip of `sample_count` samples."""
    length = _segment_samples(config)
    whole, rest = divmod(sample_count, length)
    rows = [rows_of(frames_of(count), config.pool) for count in (length, rest)]
    return whole * rows[0] + rows[1]


def _segment_samples(config: AudioConfig) -> int:
    return min(HISTORY_SAMPLES, config.position_count * 2 * HOP)


def frames_of(sample_count: int) -> int:
    """Return the number of mel frames of a segment of `sample_count` samples."""
    return -(-sample_count // HOP)


def rows_of(frames: int, pool: int) -> int:
    """Return the number of embeddings of a segment of `frames` mel frames."""
    return ((frames + 1) // 2) // pool


def block_mask(seen: list[int], positions: int, block: int) -> Tensor:
    """Return a mask, bool [segments, 1, positions, positions], True where attention is allowed.

    `seen` is the number of positions to which each segment may attend. As in the reference, these
    are as many as it has mel frames, about twice the positions of its sound, unless its padding
    ends before. So a short last segment attends to its padding, up to the end of its block. The
    model was trained with this mask.
    """
    index = torch.arange(positions)
    inside = index < torch.tensor(seen)[:, None]
    mask = inside[:, None, None, :].expand(-1, 1, positions, -1)
    if block > 0:
        blocks = index // block
        mask = mask & (blocks[None, :] <= blocks[:, None])
    return mask
