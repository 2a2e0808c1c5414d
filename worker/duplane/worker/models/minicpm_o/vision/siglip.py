"""SigLIP2's vision transformer for images of any size (NaViT). It maps each patch to a state.

Parameter names are those under the checkpoint's prefix `vpm.`. Sources:
https://arxiv.org/abs/2502.14786, and `MiniCPMO45/modeling_navit_siglip.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field, section
from duplane.worker.models.minicpm_o.layers import embedding, linear
from duplane.worker.models.minicpm_o.vision.layout import tile_rows

CHANNELS = 3


def _tanh_gelu(states: Tensor) -> Tensor:
    return functional.gelu(states, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


@dataclass(frozen=True)
class VisionConfig:
    """The fields of config.json that define the vision encoder and the resampler."""

    width: int
    ffn_width: int
    layer_count: int
    """Number of layers that are used: one less if `drop_vision_last_layer` is set."""
    head_count: int
    patch_size: int
    positions_per_side: int
    activation: str
    eps: float
    hidden: int
    """Hidden size of the LLM."""
    query_count: int
    """Embeddings per tile."""
    batch_size: int
    """Maximum number of tiles that are encoded in one batch."""

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> VisionConfig:
        """Read the checkpoint's config.json; raises `CheckpointError`."""
        vision = section(config, "vision_config")
        if (channels := field(vision, "num_channels", int, CHANNELS)) != CHANNELS:
            raise CheckpointError(f"vision_config.num_channels is {channels}, not {CHANNELS}")
        dropped = int(field(config, "drop_vision_last_layer", bool, True))
        patch_size = field(vision, "patch_size", int, 16)
        return cls(
            width=field(vision, "hidden_size", int, 768),
            ffn_width=field(vision, "intermediate_size", int, 3072),
            layer_count=field(vision, "num_hidden_layers", int, 12) - dropped,
            head_count=field(vision, "num_attention_heads", int, 12),
            patch_size=patch_size,
            positions_per_side=field(vision, "image_size", int, 224) // max(patch_size, 1),
            activation=field(vision, "hidden_act", str, "gelu_pytorch_tanh"),
            eps=field(vision, "layer_norm_eps", float, 1e-6),
            hidden=field(config, "hidden_size", int),
            query_count=tile_rows(config),
            batch_size=field(config, "vision_batch_size", int, 16),
        )

    def __post_init__(self) -> None:
        for name in ("width", "layer_count", "head_count", "patch_size", "positions_per_side"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"vision_config gives {name} {getattr(self, name)}")
        for name in ("query_count", "batch_size"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"config.json gives vision {name} {getattr(self, name)}")
        if self.width % self.head_count:
            raise CheckpointError(
                f"vision_config.hidden_size {self.width} is not a multiple of "
                f"num_attention_heads {self.head_count}"
            )
        if self.activation not in ACTIVATIONS:
            raise CheckpointError(f"vision_config.hidden_act is unknown: {self.activation!r}")


class PatchEmbeddings(nn.Module):
    """The sum of a patch's projected pixels and its position embedding."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(
            CHANNELS, config.width, config.patch_size, config.patch_size, device=device, dtype=dtype
        )
        self.position_embedding = embedding(
            config.positions_per_side**2, config.width, device=device, dtype=dtype
        )

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Map pixels [n, patches, 3 * patch_size^2] to [n, patches, width]."""
        convolution = self.patch_embedding
        # Patches do not overlap, so the convolution is one matrix product.
        pixels = functional.linear(patches, convolution.weight.flatten(1), convolution.bias)
        return pixels + self.position_embedding(positions)


class VisionAttention(nn.Module):
    """Multi-head attention among the patches of each tile."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_count, width = config.head_count, config.width
        self.q_proj = linear(width, width, bias=True, device=device, dtype=dtype)
        self.k_proj = linear(width, width, bias=True, device=device, dtype=dtype)
        self.v_proj = linear(width, width, bias=True, device=device, dtype=dtype)
        self.out_proj = linear(width, width, bias=True, device=device, dtype=dtype)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Map [n, patches, width] to the same shape; `mask` is False for padding."""
        queries, keys, values = (
            project(hidden).unflatten(-1, (self.head_count, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class VisionFeedForward(nn.Module):
    """The two-layer perceptron of a layer."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[config.activation]
        self.fc1 = linear(config.width, config.ffn_width, bias=True, device=device, dtype=dtype)
        self.fc2 = linear(config.ffn_width, config.width, bias=True, device=device, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [n, patches, width] to the same shape."""
        return self.fc2(self.activate(self.fc1(hidden)))


class VisionLayer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_norm1 = _norm(config, device, dtype)
        self.self_attn = VisionAttention(config, device, dtype)
        self.layer_norm2 = _norm(config, device, dtype)
        self.mlp = VisionFeedForward(config, device, dtype)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Map [n, patches, width] to the same shape; `mask` is False for padding."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), mask)
        return hidden + self.mlp(self.layer_norm2(hidden))


class VisionLayers(nn.Module):
    """The layers. They are a module of their own because the checkpoint nests their names."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            VisionLayer(config, device, dtype) for _ in range(config.layer_count)
        )

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Map [n, patches, width] to the same shape; `mask` is False for padding."""
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden


class VisionTransformer(nn.Module):
    """The whole encoder."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(config, device, dtype)
        self.encoder = VisionLayers(config, device, dtype)
        self.post_layernorm = _norm(config, device, dtype)

    def forward(self, patches: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Map normalised pixels [n, patches, 3 * patch_size^2] to states [n, patches, width].

        `positions` [n, patches] are indices in the position table (see `position_indices`); `mask`
        [n, 1, 1, patches] is False for padding.
        """
        return self.post_layernorm(self.encoder(self.embeddings(patches, positions), mask))


def position_indices(rows: int, columns: int, per_side: int) -> Tensor:
    """Compute the indices [rows * columns] of a tile's patches in the position table, on the CPU.

    The table divides an image of any size into `per_side` x `per_side` cells. A patch has the
    index of the cell that contains its upper left corner.
    """
    down, across = _cells(rows, per_side), _cells(columns, per_side)
    return (down[:, None] * per_side + across).flatten()


@lru_cache(maxsize=1024)
def _cells(count: int, per_side: int) -> Tensor:
    """Compute the cell of the position table for each of `count` patches along one side.

    Corners often lie exactly on a border between cells, where float32 rounding decides the cell.
    The weights were trained with the rounding of the reference, so this function has to use the
    same operations as the reference.
    """
    borders = torch.arange(1 / per_side, 1.0, 1 / per_side, dtype=torch.float32)
    step = float(1 / torch.tensor(count, dtype=torch.float32))
    corners = torch.arange(0, 1 - 1e-6, step, dtype=torch.float32)
    return torch.bucketize(corners, borders, right=True)


def _norm(config: VisionConfig, device: torch.device, dtype: torch.dtype) -> nn.LayerNorm:
    return nn.LayerNorm(config.width, config.eps, device=device, dtype=dtype)
