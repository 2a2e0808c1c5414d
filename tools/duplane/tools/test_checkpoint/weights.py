"""Draws random tensors by name, and writes them to sharded files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import safetensors.torch
import torch
from numpy.typing import NDArray

Array = NDArray[np.float32]
Tensors = dict[str, Array]

SHARDS = 2

# Embedding tables have unit variance.
_TABLES = (
    "embed_tokens.weight",
    "embed_positions.weight",
    "position_embedding.weight",
    "input_embedding.weight",
)


def random_tensors(shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int) -> Tensors:
    """Draw every tensor from its own generator, so that it does not depend on the other tensors.

    Matrices and kernels keep the variance of their input, norms are near one, biases near zero.
    """
    return {name: _draw(name, shape, seed) for name, shape in shapes}


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


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Array:
    values = random_numbers(name, seed).standard_normal(shape).astype(np.float32)
    mean, deviation = spread(name, shape)
    return np.float32(mean) + values * np.float32(deviation)


def save_safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write one safetensors file, readable by all users."""
    # `cast`, because the library declares only some of its types.
    cast("Any", safetensors.torch).save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_shards(tensors: Tensors, directory: Path) -> None:
    """Write the tensors in bfloat16 to shards of about equal size, and write their index."""
    stored = {name: torch.tensor(value).bfloat16() for name, value in tensors.items()}
    total = sum(tensor.nbytes for tensor in stored.values())
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(SHARDS)]
    written = 0
    for name, tensor in stored.items():
        shards[min(SHARDS - 1, written * SHARDS // total)][name] = tensor.contiguous()
        written += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        save_safetensors(shard, directory / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path = directory / "model.safetensors.index.json"
    path.write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))
