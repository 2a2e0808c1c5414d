"""The distributions of random weights, and how tensors are written to files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch

# Embedding tables have unit variance.
_TABLES = (
    "embed_tokens.weight",
    "embed_positions.weight",
    "position_embedding.weight",
    "input_embedding.weight",
)


def random_numbers(name: str, seed: int) -> np.random.Generator:
    """Return the random number generator that belongs to a name."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean and the deviation of a tensor's random values."""
    if name.endswith(("bias", "pos_bias_u", "pos_bias_v")):
        return 0.0, 0.05
    if len(shape) == 1:
        return 1.0, 0.05
    if name.endswith(_TABLES):
        return 0.0, 1.0
    return 0.0, 1.0 / float(np.sqrt(np.float32(np.prod(shape[1:]))))


def save_safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write one safetensors file, readable by all users."""
    # `cast`, because the library declares only some of its types.
    cast("Any", safetensors.torch).save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(0o644)
