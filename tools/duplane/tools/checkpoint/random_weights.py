"""Writes a random checkpoint of any size in the public format, one shard after the other."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import orjson
import torch
from torch import Tensor, nn

from duplane.tools.checkpoint.configs import write_configs
from duplane.tools.checkpoint.dimensions import VOICE_TOKENS, Dimensions, dimensions
from duplane.tools.checkpoint.flow_yaml import flow_yaml
from duplane.tools.checkpoint.tensor_shapes import tensor_shapes
from duplane.tools.checkpoint.tokenizer_files import train_tokenizer, write_tokenizer
from duplane.tools.checkpoint.vocoder_files import FOLDER, random_voice, weight_normed
from duplane.tools.checkpoint.weights import save_safetensors, spread
from duplane.worker.models.minicpm_o.memory import vocoder_modules

Shape = tuple[int, ...]
Draw = Callable[[str, Shape, torch.dtype], Tensor]

SHARD_BYTES = 2**31
BLOCK = 2**24
"""Number of values drawn in one call."""
STORED = torch.bfloat16
CPU = torch.device("cpu")


def write_random(
    directory: Path,
    like: str,
    *,
    factor: float = 1.0,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    device: torch.device = CPU,
) -> None:
    """Write a random checkpoint like a released one. Only one shard is in memory at a time.

    The weights are drawn on `device`; each kind of device draws different weights. The checkpoint
    has all files except the two ONNX networks for clients' voices. Its answers mean nothing. Raises
    ValueError as `dimensions` does, and OSError if the directory cannot be written.
    """
    tokenizer = train_tokenizer()
    made = dimensions(like, factor, tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, directory)
    write_configs(made.config, directory)
    draw = partial(draw_tensor, seed=seed, device=device)
    _write_shards(list(tensor_shapes(made.config)), directory, draw, shard_bytes)
    _write_vocoder(made, directory / FOLDER, draw, seed)


def plan_shards(
    tensors: list[tuple[str, Shape]], shard_bytes: int
) -> list[list[tuple[str, Shape]]]:
    """Group the tensors, in order, into shards.

    A shard has at most `shard_bytes`, unless it consists of one larger tensor.
    """
    shards: list[list[tuple[str, Shape]]] = [[]]
    held = 0
    for name, shape in tensors:
        size = _count(shape) * STORED.itemsize
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append((name, shape))
        held += size
    return shards


def _write_shards(
    tensors: list[tuple[str, Shape]], directory: Path, draw: Draw, shard_bytes: int
) -> None:
    shards = plan_shards(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_safetensors(
            {name: draw(name, shape, STORED) for name, shape in shard}, directory / file
        )
        weight_map |= dict.fromkeys((name for name, _ in shard), file)
    total = sum(_count(shape) for _, shape in tensors) * STORED.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path = directory / "model.safetensors.index.json"
    path.write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))


def draw_tensor(
    name: str, shape: Shape, dtype: torch.dtype, *, seed: int, device: torch.device = CPU
) -> Tensor:
    """Draw a tensor on `device`, block by block; return it on the CPU.

    The values depend only on the tensor's name, the seed and the kind of device.
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    mean, deviation = spread(name, shape)
    values = torch.empty(shape, dtype=dtype)
    flat = values.view(-1)
    for start in range(0, flat.numel(), BLOCK):
        part = flat[start : start + BLOCK]
        drawn = torch.randn(part.numel(), generator=generator, device=device)
        part.copy_(drawn.mul_(deviation).add_(mean).to(dtype))
    return values


def _write_vocoder(made: Dimensions, folder: Path, draw: Draw, seed: int) -> None:
    """Write assets/token2wav in float32, like the released files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flow.yaml").write_text(flow_yaml(made.flow), encoding="utf-8")
    (folder / "hift_dims.json").write_bytes(orjson.dumps(made.hift))
    flow, hift = vocoder_modules(folder)
    torch.save(dict(_drawn(flow, draw)), folder / "flow.pt")
    generator = {name: tensor.numpy() for name, tensor in _drawn(hift, draw)}
    stored = {name: torch.tensor(value) for name, value in weight_normed(generator).items()}
    torch.save(stored, folder / "hift.pt")
    voice = {name: torch.tensor(value) for name, value in random_voice(seed, VOICE_TOKENS).items()}
    save_safetensors(voice, folder / "voice.safetensors")


def _drawn(module: nn.Module, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.state_dict().items():
        yield name, draw(name, tuple(tensor.shape), torch.float32)


def _count(shape: Shape) -> int:
    return torch.Size(shape).numel()
