"""The encoder of the flow model: speech tokens to mel-rate features, a chunk at a time.

Decides the layers and their relative positions; what is kept between chunks is `flow_cache`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.model.checkpoint import CheckpointError, field
from duplane.worker.model.flow_cache import Batch, Window
from duplane.worker.model.relative_attention import RelativeAttention, relative_positions
from duplane.worker.model.sequence_conv import SequenceConv1d, tail

LOOKAHEAD_TAIL = 2

# What this encoder can be; a configuration that asks for something else is refused.
FIXED = {
    "input_layer": "linear",
    "pos_enc_layer_type": "rel_pos_espnet",
    "selfattention_layer_type": "rel_selfattn",
    "activation_type": "swish",
    "normalize_before": True,
}


@dataclass(frozen=True)
class ConformerConfig:
    """Dimensions of the encoder, named as in flow.yaml."""

    input_size: int
    output_size: int
    pre_lookahead_len: int
    num_blocks: int
    num_up_blocks: int
    up_stride: int
    attention_heads: int
    key_bias: bool
    linear_units: int

    @classmethod
    def from_yaml(cls, config: Mapping[str, Any]) -> ConformerConfig:
        """Read the `encoder` mapping of flow.yaml; absent values are the reference's defaults."""
        for name, value in FIXED.items():
            if config.get(name, value) != value:
                raise CheckpointError(f"flow.encoder.{name} {config[name]!r} is not supported")
        stride = field(config, "up_stride", int, 2)
        if field(config, "up_scale_factor", float, 2.0) != stride:
            raise CheckpointError("flow.encoder.up_scale_factor differs from up_stride")
        return cls(
            input_size=field(config, "input_size", int),
            output_size=field(config, "output_size", int, 256),
            pre_lookahead_len=field(config, "pre_lookahead_len", int, 3),
            num_blocks=field(config, "num_blocks", int, 6),
            num_up_blocks=field(config, "num_up_blocks", int, 4),
            up_stride=stride,
            attention_heads=field(config, "attention_heads", int, 4),
            key_bias=field(config, "key_bias", bool, True),
            linear_units=field(config, "linear_units", int, 2048),
        )


class FeedForward(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(width, inner)
        self.w_2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return self.w_2(functional.silu(self.w_1(x)))


class ConformerLayer(nn.Module):
    """Attention and feed-forward with a norm before each; no convolution in this vocoder."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width = config.output_size
        self.self_attn = RelativeAttention(width, config.attention_heads, config.key_bias)
        self.feed_forward = FeedForward(width, config.linear_units)
        self.norm_ff = nn.LayerNorm(width, eps=1e-12)
        self.norm_mha = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, window: Window, layer: int, mask: Tensor | None) -> Tensor:
        """Keep the shape `[batch, new, width]`."""
        x = x + self.self_attn(self.norm_mha(x), window, layer, mask)
        return x + self.feed_forward(self.norm_ff(x))


class Embed(nn.Module):
    """Linear, norm, and the scale that keeps features large against positions."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(size, width), nn.LayerNorm(width, eps=1e-5))
        self.scale = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., size]` to `[..., width]`."""
        return self.out(x) * self.scale


class Lookahead(nn.Module):
    """Two convolutions that let a token see the next `length` ones."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.conv1 = SequenceConv1d(width, width, length + 1)
        self.conv2 = SequenceConv1d(width, width, LOOKAHEAD_TAIL + 1)

    def forward(self, x: Tensor, last: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map `[batch, new + length, width]` to `[batch, new, width]` and the next `last`."""
        seen = torch.cat((last, functional.leaky_relu(self.conv1(x))), 1)
        return x[:, : x.shape[1] - self.length] + self.conv2(seen), tail(seen, last.shape[1], ends)


class Upsample(nn.Module):
    """Repeat every token `stride` times, then convolve over the past."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = SequenceConv1d(width, width, 2 * stride + 1)

    def forward(self, x: Tensor, last: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map `[batch, new, width]` to `[batch, new * stride, width]` and the next `last`."""
        seen = torch.cat((last, x.repeat_interleave(self.stride, 1)), 1)
        return self.conv(seen), tail(seen, last.shape[1], ends)


class UpsampleConformer(nn.Module):
    """The whole encoder, streaming over slotted caches."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.output_size
        self.embed = Embed(config.input_size, width)
        self.pre_lookahead_layer = Lookahead(width, config.pre_lookahead_len)
        self.encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.num_blocks))
        self.up_layer = Upsample(width, config.up_stride)
        self.up_embed = Embed(width, width)
        self.up_encoders = nn.ModuleList(
            ConformerLayer(config) for _ in range(config.num_up_blocks)
        )
        self.after_norm = nn.LayerNorm(width, eps=1e-5)

    def prepare(self, columns: int, chunk: int) -> None:
        """Compute the positions for caches of `columns` frames and chunks of `chunk` frames."""
        encoding = relative_positions(self.config.output_size, columns, chunk)
        encoding = encoding.to(self.after_norm.weight)
        for layer in (*self.encoders, *self.up_encoders):
            cast("ConformerLayer", layer).self_attn.prepare(encoding, columns)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Map embedded tokens `[batch, new + lookahead, input_size]` to frames.

        Returns `[batch, new * stride, output_size]`. What lies behind a row's own tokens must be
        the tokens ahead, or, at the end of a turn, `batch.beyond`: there the embedding counts as 0.
        """
        caches, slots = batch.caches, batch.slots
        x = self.embed(x)
        if batch.beyond is not None:
            x = x.masked_fill(batch.beyond[..., None], 0.0)
        last, ends = caches.lookahead_tail[slots], batch.token_ends
        x, caches.next_lookahead_tail[slots] = self.pre_lookahead_layer(x, last, ends)
        x = _run(self.encoders, x, batch.token_window, batch.token_mask)
        last, ends = caches.upsample_tail[slots], batch.frame_ends
        x, caches.next_upsample_tail[slots] = self.up_layer(x, last, ends)
        x = _run(self.up_encoders, self.up_embed(x), batch.frame_window, batch.frame_mask)
        return self.after_norm(x)


def _run(layers: nn.ModuleList, x: Tensor, window: Window, mask: Tensor | None) -> Tensor:
    for place, layer in enumerate(layers):
        x = layer(x, window, place, mask)
    return x
