"""The flow model's estimator: a diffusion transformer that maps noisy mel to its velocity.

Sources: DiT (https://arxiv.org/abs/2212.09748), conditional flow matching
(https://arxiv.org/abs/2210.02747), and `DiT` of the package `stepaudio2` in minicpmo-utils 1.0.6.
The time steps are fixed, so everything that depends only on them is computed once. The state
between chunks is in `flow_cache`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field
from duplane.worker.models.minicpm_o.vocoder.conformer import TimeConv1d, tail
from duplane.worker.models.minicpm_o.vocoder.flow_cache import FlowBatch

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
        """Read `estimator` of flow.yaml; absent fields have the defaults of the reference."""
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
    """Sines and cosines of a time in [0, 1], followed by two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        """Map `[steps]` to `[steps, width]`."""
        half = FREQUENCIES // 2
        rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=times.device) / half)
        angles = (times * TIME_SCALE)[:, None] * rates
        return self.mlp(torch.cat((torch.cos(angles), torch.sin(angles)), -1))


class ChunkAttention(nn.Module):
    """Attention of a chunk to itself and the cached frames, without positions."""

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

    def forward(self, x: Tensor, batch: FlowBatch, index: tuple[int, int]) -> Tensor:
        """Map `[batch, new, 2, width]` to the same shape.

        The two halves of dimension 2 (with and without condition) do not attend to each other.
        `index` is the solver step and the layer.
        """
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).flatten(2, 3)
            for linear in (self.to_q, self.to_k, self.to_v)
        )
        query, key = self.q_norm(query), self.k_norm(key)
        keys, values = batch.estimator_window.extend(
            index, key.transpose(1, 2), value.transpose(1, 2)
        )
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=batch.frame_mask
        )
        return self.proj(mixed.transpose(1, 2).reshape(*x.shape[:3], -1))


class Mlp(nn.Module):
    """Two linear layers with GELU (tanh form) between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class CausalConvBlock(nn.Module):
    """Two causal convolutions with norm and Mish between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # The names are indices in the list of the reference. The other modules of this list only
        # transpose.
        self.block = nn.ModuleDict(
            {
                "1": TimeConv1d(width, width, CONV_KERNEL),
                "3": nn.LayerNorm(width),
                "6": TimeConv1d(width, width, CONV_KERNEL),
            }
        )

    def forward(self, x: Tensor, batch: FlowBatch, index: tuple[int, int]) -> Tensor:
        """Map `[batch, new, 2, width]` to the same shape. `index` is the solver step and layer."""
        caches = batch.caches
        for number, convolution in enumerate((self.block["1"], self.block["6"])):
            tails = (batch.slots, *index, number)
            seen = torch.cat((caches.estimator_tails[tails], x), 1)
            caches.next_estimator_tails[tails] = tail(seen, CONV_KERNEL - 1, batch.frame_ends)
            x = convolution(seen)
            if number == 0:
                x = functional.mish(self.block["3"](x))
        return x


class DiTBlock(nn.Module):
    """Attention, convolution and MLP, each modulated and gated by the time step (adaLN-zero)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attn = ChunkAttention(width, config.num_heads, config.head_dim)
        self.conv = CausalConvBlock(width)
        self.mlp = Mlp(width, int(width * config.mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 9 * width))

    def forward(self, x: Tensor, batch: FlowBatch, index: tuple[int, int], time: Tensor) -> Tensor:
        """Map `[batch, new, 2, width]` to the same shape.

        `time` `[9, width]` has three shifts, three scales and three gates; 1 is already added to
        the scales.
        """
        attn_shift, attn_scale, attn_gate = time[0:3]
        mlp_shift, mlp_scale, mlp_gate = time[3:6]
        conv_shift, conv_scale, conv_gate = time[6:9]
        mixed = self.attn(modulate(x, attn_shift, attn_scale), batch, index)
        x = torch.addcmul(x, attn_gate, mixed)
        mixed = self.conv(modulate(x, conv_shift, conv_scale), batch, index)
        x = torch.addcmul(x, conv_gate, mixed)
        return torch.addcmul(x, mlp_gate, self.mlp(modulate(x, mlp_shift, mlp_scale)))


class FinalLayer(nn.Module):
    """A modulated norm and the projection to mel channels."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.linear = nn.Linear(width, config.out_channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map `[..., width]` to `[..., out_channels]`; `time` is `[2, width]`."""
        return self.linear(modulate(x, time[0], time[1]))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalise without parameters, then scale and shift."""
    return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=1e-6), scale)


class DiT(nn.Module):
    """The whole estimator, for the time steps that `prepare` sets."""

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
        """Compute the shifts, scales and gates of these time steps for every block."""
        embedded = self.t_embedder(torch.tensor(times, device=self.in_proj.weight.device))
        width = self.config.hidden_size
        blocks = [cast("DiTBlock", block).adaLN_modulation(embedded) for block in self.blocks]
        self.block_times = torch.stack(blocks, 1).reshape(len(times), len(blocks), 9, width)
        self.block_times[:, :, 1::3] += 1.0
        self.final_times = self.final_layer.adaLN_modulation(embedded).reshape(-1, 2, width)
        self.final_times[:, 1] += 1.0

    def project(self, conditions: Tensor) -> Tensor:
        """Project the conditions (mu, speaker and prompt mel), which are the same at all steps.

        Maps `[batch, new, 3 * out_channels]` to `[batch, new, 2, hidden]`: with and without
        conditions.
        """
        weight = self.in_proj.weight[:, self.config.out_channels :]
        given = functional.linear(conditions, weight, self.in_proj.bias)
        return torch.stack((given, self.in_proj.bias.expand_as(given)), 2)

    def forward(self, noisy: Tensor, projected: Tensor, batch: FlowBatch, step: int) -> Tensor:
        """Map noisy mel `[batch, new, mel]` to velocities `[batch, new, 2, mel]`."""
        weight = self.in_proj.weight[:, : self.config.out_channels]
        x = projected + functional.linear(noisy, weight)[:, :, None]
        for layer, block in enumerate(self.blocks):
            x = block(x, batch, (step, layer), self.block_times[step, layer])
        return self.final_layer(x, self.final_times[step])
