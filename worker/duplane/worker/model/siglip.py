"""SigLIP2's vision transformer over images of any size: the modules under the prefix `vpm.`.

Patches of several images, padded to one length, in; one state per patch out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.model.checkpoint import CheckpointError, field, section
from duplane.worker.model.decoder import embedding, linear

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
    """The parts of config.json that shape the vision encoder and the resampler."""

    width: int
    ffn_width: int
    layer_count: int
    """Layers that are run: `drop_vision_last_layer` has been taken into account."""
    head_count: int
    patch_size: int
    positions_per_side: int
    activation: str
    eps: float
    hidden: int
    """Width of the decoder the embeddings are for."""
    query_count: int
    """Embeddings per image or slice."""
    batch_size: int
    """Images that are encoded at once, at most."""

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> VisionConfig:
        """Read from the checkpoint's whole config.json; raises `CheckpointError`."""
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
            query_count=field(config, "query_num", int, 64),
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
    """A patch's pixels and its place in the image, as one vector."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(
            CHANNELS, config.width, config.patch_size, config.patch_size, device=device, dtype=dtype
        )
        self.position_embedding = embedding(
            config.positions_per_side**2, config.width, device=device, dtype=dtype
        )

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Vectors [n, patches, width] of pixels [n, patches, 3 * patch_size^2]."""
        convolution = self.patch_embedding
        # Patches do not overlap, so the convolution is one product per patch.
        pixels = functional.linear(patches, convolution.weight.flatten(1), convolution.bias)
        return pixels + self.position_embedding(positions)


class VisionAttention(nn.Module):
    """Multi-head attention among the patches of each image."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_count = config.head_count
        self.q_proj = _square(config, device, dtype)
        self.k_proj = _square(config, device, dtype)
        self.v_proj = _square(config, device, dtype)
        self.out_proj = _square(config, device, dtype)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """States [n, patches, width]; the mask is True where a patch is seen."""
        queries, keys, values = (
            project(hidden).unflatten(-1, (self.head_count, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The two-layer perceptron of an encoder layer."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[config.activation]
        self.fc1 = linear(config.width, config.ffn_width, bias=True, device=device, dtype=dtype)
        self.fc2 = linear(config.ffn_width, config.width, bias=True, device=device, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """States [n, patches, width]."""
        return self.fc2(self.activate(self.fc1(hidden)))


class VisionLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_norm1 = _norm(config, device, dtype)
        self.self_attn = VisionAttention(config, device, dtype)
        self.layer_norm2 = _norm(config, device, dtype)
        self.mlp = FeedForward(config, device, dtype)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """States [n, patches, width]."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), mask)
        return hidden + self.mlp(self.layer_norm2(hidden))


class VisionLayers(nn.Module):
    """The stack of layers, nested as the checkpoint does."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            VisionLayer(config, device, dtype) for _ in range(config.layer_count)
        )

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """States [n, patches, width]."""
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden


class VisionTransformer(nn.Module):
    """Parameters and layers under the checkpoint's prefix `vpm.`."""

    def __init__(self, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(config, device, dtype)
        self.encoder = VisionLayers(config, device, dtype)
        self.post_layernorm = _norm(config, device, dtype)

    def forward(self, patches: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """States [n, patches, width] of normalised pixels [n, patches, 3 * patch_size^2].

        `positions` [n, patches] are rows of the position table, see `place_patches`; the mask
        [n, 1, 1, patches] is False for padding.
        """
        return self.post_layernorm(self.encoder(self.embeddings(patches, positions), mask))


def place_patches(rows: int, columns: int, per_side: int) -> Tensor:
    """Rows [rows * columns] of the position table for the patches of one image, on the CPU.

    The table covers an image of any size and shape with `per_side` x `per_side` places; each
    patch takes the one its upper left corner lies in.
    """
    down, across = _places(rows, per_side), _places(columns, per_side)
    return (down[:, None] * per_side + across).flatten()


@lru_cache(maxsize=1024)
def _places(count: int, per_side: int) -> Tensor:
    """The place of each of `count` patches along one side.

    Corners often lie exactly on a border between places, so float32 rounding decides where they
    go: the weights were trained with these very steps.
    """
    borders = torch.arange(1 / per_side, 1.0, 1 / per_side, dtype=torch.float32)
    step = float(1 / torch.tensor(count, dtype=torch.float32))
    corners = torch.arange(0, 1 - 1e-6, step, dtype=torch.float32)
    return torch.bucketize(corners, borders, right=True)


def _square(config: VisionConfig, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    return linear(config.width, config.width, bias=True, device=device, dtype=dtype)


def _norm(config: VisionConfig, device: torch.device, dtype: torch.dtype) -> nn.LayerNorm:
    return nn.LayerNorm(config.width, config.eps, device=device, dtype=dtype)
