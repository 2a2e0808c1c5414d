"""The whole-clip audio path: voice prompts and chat audio, without caches.

A clip is cut into pieces of 30 s, or what the table of positions covers; within a piece
attention goes by one-second blocks, each seeing itself and all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from duplane.worker.model.mel import HISTORY_SAMPLES, HOP, LogMel
from duplane.worker.model.transfer import upload
from duplane.worker.model.whisper import AudioConfig, AudioProjector, WhisperEncoder


def encode_clips(
    apm: WhisperEncoder,
    projector: AudioProjector,
    log_mel: LogMel,
    clips: Sequence[np.ndarray],
    *,
    is_blockwise: bool = True,
) -> list[Tensor]:
    """Embeddings [rows, hidden] of each of several 16 kHz clips [n].

    They are encoded in one batch, which a shorter clip can tell by what pads it; see
    `block_mask`. Not `is_blockwise`, all of a piece sees all of it. Raises ValueError for
    samples that are not one finite row.
    """
    for samples in clips:
        if samples.ndim != 1 or not np.isfinite(samples).all():
            raise ValueError("audio: expected one row of finite samples")
    cut = [split(apm.config, samples) for samples in clips]
    pieces = [log_mel.clip(piece) for group in cut for piece in group]
    counts = [rows_of(len(piece), apm.config.pool) for piece in pieces]
    if sum(counts) == 0:
        parameter = apm.conv1.weight
        shape = (0, apm.config.hidden)
        return [torch.zeros(shape, device=parameter.device, dtype=parameter.dtype) for _ in clips]
    hidden = apm.convolve(pad_sequence(pieces, batch_first=True))
    positions = hidden.shape[1]
    hidden = hidden + apm.embed_positions.weight[:positions]
    block = apm.config.chunk_positions if is_blockwise else 0
    mask = upload(block_mask([len(piece) for piece in pieces], positions, block), hidden.device)
    for layer in apm.layers:
        hidden = layer(hidden, mask)
    embeds = projector(apm.layer_norm(hidden))
    found = [rows[:count] for rows, count in zip(embeds, counts, strict=True)]
    ends = list(accumulate(len(group) for group in cut))
    return [
        torch.cat([*found[end - len(group) : end], embeds[0, :0]])
        for group, end in zip(cut, ends, strict=True)
    ]


def split(config: AudioConfig, samples: np.ndarray) -> list[np.ndarray]:
    """The pieces of a clip that are encoded apart from each other."""
    length = _piece_samples(config)
    return [samples[start : start + length] for start in range(0, len(samples), length)]


def clip_rows(config: AudioConfig, sample_count: int) -> int:
    """How many embeddings a clip of so many samples gives."""
    length = _piece_samples(config)
    whole, rest = divmod(sample_count, length)
    return whole * rows_of(-(-length // HOP), config.pool) + rows_of(-(-rest // HOP), config.pool)


def _piece_samples(config: AudioConfig) -> int:
    return min(HISTORY_SAMPLES, config.position_count * 2 * HOP)


def rows_of(frames: int, pool: int) -> int:
    """How many embeddings a piece of so many mel frames gives."""
    return ((frames + 1) // 2) // pool


def block_mask(frames: list[int], positions: int, block: int) -> Tensor:
    """[pieces, 1, positions, positions], True where a position sees another.

    The limit of a padded piece is its length in mel frames, not in positions: the model was
    trained and is run elsewhere with that, so what pads a short last piece is seen up to the
    end of its block.
    """
    index = torch.arange(positions)
    inside = index < torch.tensor(frames)[:, None]
    mask = inside[:, None, None, :].expand(-1, 1, positions, -1)
    if block > 0:
        blocks = index // block
        mask = mask & (blocks[None, :] <= blocks[:, None])
    return mask
