"""The whole-clip audio path: voice prompts and chat audio, without caches.

A clip is cut into pieces of 30 s, or what the table of positions covers; within a piece
attention goes by one-second blocks, each seeing itself and all before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from duplane.worker.model.mel import HISTORY_SAMPLES, HOP, LogMel
from duplane.worker.model.transfer import upload
from duplane.worker.model.whisper import AudioConfig, AudioProjector, WhisperEncoder

BATCH_FRAMES = HISTORY_SAMPLES // HOP
"""Mel frames that are encoded at once, padding counted: those of the longest piece."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a clip that is encoded apart from all others, in `rows` embeddings.

    It has `frames` mel frames and is padded to at least `padded_frames`, as far as it can tell.
    """

    samples: np.ndarray
    frames: int
    padded_frames: int
    rows: int


def cut(
    config: AudioConfig, clips: Sequence[np.ndarray], *, is_blockwise: bool = True
) -> list[list[Piece]]:
    """The pieces of each of several 16 kHz clips [n].

    Pieces are heard as if all of them were padded to the longest and encoded in one batch, which
    a shorter one can tell by what pads it; see `block_mask`. How far it can tell is as far as it
    is padded, so that batches of any make give the same. Not `is_blockwise`, all of a piece sees
    all of it. Raises ValueError for samples that are not one finite row.
    """
    for samples in clips:
        if samples.ndim != 1 or not np.isfinite(samples).all():
            raise ValueError("audio: expected one row of finite samples")
    parts = [split(config, samples) for samples in clips]
    longest = max((frames_of(len(part)) for group in parts for part in group), default=0)
    block = config.chunk_positions if is_blockwise else 0
    return [[_piece(config, part, block, longest) for part in group] for group in parts]


def _piece(config: AudioConfig, samples: np.ndarray, block: int, longest: int) -> Piece:
    frames = frames_of(len(samples))
    seen = frames if block == 0 else -(-((frames + 1) // 2) // block) * block
    return Piece(samples, frames, min(2 * seen, longest), rows_of(frames, config.pool))


def batches(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Pieces to encode together, in their order: few, so that each batch is a short step."""
    start, widest = 0, 0
    for index, piece in enumerate(pieces):
        widest = max(widest, piece.padded_frames)
        if start < index and (index + 1 - start) * widest > BATCH_FRAMES:
            yield pieces[start:index]
            start, widest = index, piece.padded_frames
    if start < len(pieces):
        yield pieces[start:]


def encode_batch(
    apm: WhisperEncoder,
    projector: AudioProjector,
    log_mel: LogMel,
    pieces: Sequence[Piece],
    *,
    is_blockwise: bool = True,
) -> list[Tensor]:
    """Embeddings [rows, hidden] of each piece of one batch; `is_blockwise` as they were cut."""
    parameter = apm.conv1.weight
    if not any(piece.rows for piece in pieces):
        none = torch.zeros((0, apm.config.hidden), device=parameter.device, dtype=parameter.dtype)
        return [none for _ in pieces]
    width = max(piece.padded_frames for piece in pieces)
    features = pad_sequence([log_mel.clip(piece.samples) for piece in pieces], batch_first=True)
    features = torch.nn.functional.pad(features, (0, 0, 0, width - features.shape[1]))
    hidden = apm.convolve(features)
    positions = hidden.shape[1]
    hidden = hidden + apm.embed_positions.weight[:positions]
    block = apm.config.chunk_positions if is_blockwise else 0
    frames = [piece.frames for piece in pieces]
    mask = upload(block_mask(frames, positions, block), hidden.device)
    for layer in apm.layers:
        hidden = layer(hidden, mask)
    embeds = projector(apm.layer_norm(hidden))
    return [rows[: piece.rows] for rows, piece in zip(embeds, pieces, strict=True)]


def split(config: AudioConfig, samples: np.ndarray) -> list[np.ndarray]:
    """The pieces of a clip that are encoded apart from each other."""
    length = _piece_samples(config)
    return [samples[start : start + length] for start in range(0, len(samples), length)]


def clip_rows(config: AudioConfig, sample_count: int) -> int:
    """How many embeddings a clip of so many samples gives."""
    length = _piece_samples(config)
    whole, rest = divmod(sample_count, length)
    rows = [rows_of(frames_of(count), config.pool) for count in (length, rest)]
    return whole * rows[0] + rows[1]


def _piece_samples(config: AudioConfig) -> int:
    return min(HISTORY_SAMPLES, config.position_count * 2 * HOP)


def frames_of(sample_count: int) -> int:
    """How many mel frames a piece of so many samples has."""
    return -(-sample_count // HOP)


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
