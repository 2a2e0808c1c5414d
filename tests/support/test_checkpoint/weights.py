"""Draws random tensors by name, and writes them to sharded files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from duplane.tools.checkpoint.weights import random_numbers, save_safetensors, spread

Array = NDArray[np.float32]
Tensors = dict[str, Array]

SHARDS = 2


def random_tensors(shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int) -> Tensors:
    """Draw every tensor from its own generator, so that it does not depend on the other tensors.

    Matrices and kernels keep the variance of their input, norms are near one, biases near zero.
    """
    return {name: _draw(name, shape, seed) for name, shape in shapes}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Array:
    values = random_numbers(name, seed).standard_normal(shape).astype(np.float32)
    mean, deviation = spread(name, shape)
    return np.float32(mean) + values * np.float32(deviation)


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
