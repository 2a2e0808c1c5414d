"""The estimator of the flow model: a diffusion transformer that says where noisy mel should move.

Decides the layers; time steps are known in advance, so all that depends on them alone is computed
once. What is kept between chunks is `flow_cache`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.model.checkpoint import CheckpointError, field
from duplane.worker.model.flow_cache import Batch
from duplane.worker.model.sequence_conv import SequenceConv1d, tail

FREQUENCIES = 256
TIME_SCALE = 1000.0
CONV_KERNEL = 3


@dataclass(frozen=True)
class DiTConfig:
    """Dimensions of the estimator, named as in flow.yaml."""

    in_channels: int
    out_channels: int
    mlp_ratio: float
    depth: int
    num_heads: int
    head_dim: int
    hidden_size: int

    @classmethod
    def from_yaml(cls, config: Mapping[str, Any]) -> DiTConfig:
        """Read the `estimator` mapping of flow.yaml; absent values are the reference's defaults."""
        built = cls(
            in_channels=field(config, "in_channels", int),
            out_channels=field(config, "out_channels", int),
            mlp_ratio=field(config, "mlp_ratio", float, 4.0),
            depth=field(config, "depth", int, 28),
            num_heads=field(config, "num_heads", int, 8),
            head_dim=field(config, "head_dim", int, 64),
            hidden_size=field(config, "hidden_size", int, 256),
        )
        if built.in_channels != 4 * built.out_channels:
            raise CheckpointError("flow.decoder.estimator.in_channels is not 4 * out_channels")
        return built


class TimestepEmbedder(nn.Module):
    """Sines and cosines of a time in [0, 1], through two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        """Map `[steps]` to `[steps, width]`."""
        half = FREQUENCIES // 2
        rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=times.device) / half)
        angles = (times * TIME_SCALE)[:, None] * rates
        return self.mlp(torch.cat((torch.cos(angles), torch.sin(angles)), -1))


class Attention(nn.Module):
    """Attention of a chunk over itself and the cached frames, in no order, without positions."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        inner = heads * head_width
        self.to_q = nn.Linear(width, inner)
        self.to_k = nn.Linear(width, inner)
        self.to_v = nn.Linear(width, inner)
        self.q_norm = nn.LayerNorm(head_width)
        self.k_norm = nn.LayerNorm(head_width)
        self.proj = nn.Linear(inner, width)

    def forward(self, x: Tensor, batch: Batch, place: tuple[int, int]) -> Tensor:
        """Map `[batch, new, 2, width]` to the same; the pair does not attend to each other."""
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).flatten(2, 3)
            for linear in (self.to_q, self.to_k, self.to_v)
        )
        query, key = self.q_norm(query), self.k_norm(key)
        keys, values = batch.estimator_window.extend(
            place, key.transpose(1, 2), value.transpose(1, 2)
        )
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=batch.frame_mask
        )
        return self.proj(mixed.transpose(1, 2).reshape(*x.shape[:3], -1))


class Mlp(nn.Module):
    """Two linear layers with the tanh form of GELU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class CausalConvBlock(nn.Module):
    """Two causal convolutions with norm and Mish between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # The numbers are the reference's, which has transposes at the other places.
        self.block = nn.ModuleDict(
            {
                "1": SequenceConv1d(width, width, CONV_KERNEL),
                "3": nn.LayerNorm(width),
                "6": SequenceConv1d(width, width, CONV_KERNEL),
            }
        )

    def forward(self, x: Tensor, batch: Batch, place: tuple[int, int]) -> Tensor:
        """Keep the shape `[batch, new, 2, width]`."""
        x = functional.mish(self.block["3"](self._convolve("1", x, batch, (*place, 0))))
        return self._convolve("6", x, batch, (*place, 1))

    def _convolve(self, name: str, x: Tensor, batch: Batch, place: tuple[int, ...]) -> Tensor:
        caches, index = batch.caches, (batch.slots, *place)
        seen = torch.cat((caches.estimator_tails[index], x), 1)
        caches.next_estimator_tails[index] = tail(seen, CONV_KERNEL - 1, batch.frame_ends)
        return self.block[name](seen)


class DiTBlock(nn.Module):
    """Attention, convolution and MLP, each shifted, scaled and gated by the time step."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attn = Attention(width, config.num_heads, config.head_dim)
        self.conv = CausalConvBlock(width)
        self.mlp = Mlp(width, int(width * config.mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 9 * width))

    def forward(self, x: Tensor, batch: Batch, place: tuple[int, int], time: Tensor) -> Tensor:
        """Keep the shape `[batch, new, 2, width]`; `time` is `[9, width]`, scales with 1 added."""
        attn_shift, attn_scale, attn_gate = time[0:3]
        mlp_shift, mlp_scale, mlp_gate = time[3:6]
        conv_shift, conv_scale, conv_gate = time[6:9]
        mixed = self.attn(modulate(x, attn_shift, attn_scale), batch, place)
        x = torch.addcmul(x, attn_gate, mixed)
        mixed = self.conv(modulate(x, conv_shift, conv_scale), batch, place)
        x = torch.addcmul(x, conv_gate, mixed)
        return torch.addcmul(x, mlp_gate, self.mlp(modulate(x, mlp_shift, mlp_scale)))


class FinalLayer(nn.Module):
    """Norm and projection to mel channels, shifted and scaled by the time step."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.linear = nn.Linear(width, config.out_channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map `[..., width]` to `[..., out_channels]`; `time` is `[2, width]`."""
        return self.linear(modulate(x, time[0], time[1]))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Norm without parameters, then scale and shift."""
    return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=1e-6), scale)


class DiT(nn.Module):
    """The whole estimator, at time steps that are fixed once and for all."""

    block_times: Tensor
    final_times: Tensor

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.t_embedder = TimestepEmbedder(config.hidden_size)
        self.in_proj = nn.Linear(config.in_channels, config.hidden_size)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config)
        self.register_buffer("block_times", torch.empty(0), persistent=False)
        self.register_buffer("final_times", torch.empty(0), persistent=False)

    def prepare(self, times: Sequence[float]) -> None:
        """Fix the time steps and compute their shifts, scales and gates for every block."""
        embedded = self.t_embedder(torch.tensor(times, device=self.in_proj.weight.device))
        width = self.config.hidden_size
        blocks = [cast("DiTBlock", block).adaLN_modulation(embedded) for block in self.blocks]
        self.block_times = torch.stack(blocks, 1).reshape(len(times), len(blocks), 9, width)
        self.block_times[:, :, 1::3] += 1.0
        self.final_times = self.final_layer.adaLN_modulation(embedded).reshape(-1, 2, width)
        self.final_times[:, 1] += 1.0

    def project(self, conditions: Tensor) -> Tensor:
        """Project what stays the same at all steps: mu, speaker and prompt mel, side by side.

        Maps `[batch, new, 3 * out_channels]` to `[batch, new, 2, hidden]`: with it, and without.
        """
        weight = self.in_proj.weight[:, self.config.out_channels :]
        given = functional.linear(conditions, weight, self.in_proj.bias)
        return torch.stack((given, self.in_proj.bias.expand_as(given)), 2)

    def forward(self, noisy: Tensor, projected: Tensor, batch: Batch, step: int) -> Tensor:
        """Map noisy mel `[batch, new, out_channels]` to its direction `[batch, new, 2, ...]`."""
        weight = self.in_proj.weight[:, : self.config.out_channels]
        x = projected + functional.linear(noisy, weight)[:, :, None]
        for layer, block in enumerate(self.blocks):
            x = block(x, batch, (step, layer), self.block_times[step, layer])
        return self.final_layer(x, self.final_times[step])
