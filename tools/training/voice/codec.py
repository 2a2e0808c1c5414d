"""The codec of the assistant's voice: each speech token is a cluster of features (k-means)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.vocoder.harmonic import TOKEN_FRAMES
from duplane.worker.models.types import FloatArray
from training.torch_calls import integers, split, transposed
from training.voice.features import FRAME_WIDTH, MEL_BINS, frames_of

ITERATIONS = 20
BLOCK = 4096
PITCH_SCALE, VOICING_SCALE = 6.0, 3.0
"""Weights of pitch and voicing in distances between frames; each band of the log-mel has the weight
1."""


def token_features(samples: FloatArray) -> Tensor:
    """Return the features [tokens, TOKEN_FRAMES, FRAME_WIDTH] of samples at 24 kHz."""
    frames = torch.tensor(frames_of(samples))
    count = len(frames) // TOKEN_FRAMES
    return frames[: count * TOKEN_FRAMES].view(count, TOKEN_FRAMES, FRAME_WIDTH)


def _scaled(features: Tensor) -> Tensor:
    scale = torch.ones(FRAME_WIDTH)
    scale[MEL_BINS], scale[MEL_BINS + 1] = PITCH_SCALE, VOICING_SCALE
    scaled: Tensor = features * scale
    return torch.flatten(scaled, 1)


def nearest(features: Tensor, table: Tensor) -> Tensor:
    """Return the token [n] nearest to each of `features` [n, frames, values]."""
    centres = _scaled(table)
    lengths = centres.square().sum(-1)
    found = [
        torch.argmin(lengths - 2 * part @ transposed(centres), -1)
        for part in split(_scaled(features), BLOCK)
    ]
    return torch.cat(found)


def fit_table(features: Tensor, count: int, seed: int) -> Tensor:
    """Compute a codebook [count, frames, values] (k-means) of features [n, frames, values]."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(features), generator=generator)[:count]
    table = features[chosen].clone()
    for number in range(ITERATIONS):
        owners = nearest(features, table)
        sums = torch.zeros_like(table).index_add_(0, owners, features)
        counts = torch.bincount(owners, minlength=count)
        spare = torch.randperm(len(features), generator=generator)[:count]
        is_used = (counts > 0)[:, None, None]
        table = torch.where(is_used, sums / counts.clamp(min=1)[:, None, None], features[spare])
        if number % 5 == 4:
            error = (features - table[owners])[..., :MEL_BINS].abs().mean()
            sys.stderr.write(f"codec {number + 1}/{ITERATIONS}  mel error {error:.3f}\n")
    table[..., MEL_BINS + 1] = table[..., MEL_BINS + 1].round()
    return table


def encode(samples: FloatArray, table: Tensor) -> list[int]:
    """Return the tokens of samples at 24 kHz."""
    return integers(nearest(token_features(samples), table))


def silence_token(table: Tensor) -> int:
    """Return the token of silence: the quietest one."""
    return int(table[..., :MEL_BINS].mean((1, 2)).argmin())


def all_features(sounds: Sequence[FloatArray]) -> Tensor:
    """Return the features of all tokens of several sounds."""
    return torch.cat([token_features(samples) for samples in sounds])
