"""The flow model's encoder: a streaming Conformer that maps speech tokens to mel frame features.

Sources: Conformer (https://arxiv.org/abs/2005.08100), relative positions of Transformer-XL
(https://arxiv.org/abs/1901.02860), and `UpsampleConformerEncoderV2` of the package `stepaudio2` in
minicpmo-utils 1.0.6. The state between chunks is in `flow_cache`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field
from duplane.worker.models.minicpm_o.vocoder.flow_cache import CacheWindow, FlowBatch

LOOKAHEAD_TAIL = 2

# The only supported values. A configuration with other values is refused.
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
        """Read `encoder` of flow.yaml; absent fields have the defaults of the reference."""
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


class TimeConv1d(nn.Conv1d):
    """An unpadded `Conv1d` along dimension 1 of `[batch, time, ..., channels]`.

    The parameters are those of `nn.Conv1d`. The convolution is computed as one matrix product. This
    needs no transposes, and the result does not depend on the algorithm that a device chooses for a
    batch size.
    """

    def prepare(self) -> None:
        """Store the weight as `[out, kernel, in]`, the order that `forward` needs."""
        stored = self.weight.detach().transpose(1, 2).contiguous().transpose(1, 2)
        self.weight = nn.Parameter(stored, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map `[batch, time, ..., in]` to `[batch, time - kernel + 1, ..., out]`."""
        kernel = self.kernel_size[0]
        time = input.shape[1] - kernel + 1
        # Whole rows are copied, which is faster than gathering the windows of each channel.
        windows = torch.cat([input[:, start : start + time] for start in range(kernel)], -1)
        return functional.linear(windows, self.weight.transpose(1, 2).flatten(1), self.bias)


def tail(sequence: Tensor, length: int, ends: Tensor | None) -> Tensor:
    """Return the last `length` entries along dimension 1 that are not padding.

    `sequence` is `[batch, length + time, ...]`: the tail of the previous chunk, then this chunk.
    `ends` [batch] is the number of valid entries of this chunk; None means that all are valid.
    """
    if ends is None:
        return sequence[:, sequence.shape[1] - length :]
    columns = ends[:, None] + torch.arange(length, device=sequence.device)
    rows = torch.arange(len(sequence), device=sequence.device)[:, None]
    return sequence[rows, columns]


def relative_positions(width: int, farthest: int, ahead: int) -> Tensor:
    """Compute sines and cosines of the distances from `farthest` down to `-ahead`, a row for each.

    A distance is the number of columns from a key to the query; it is negative for a later key.
    Returns `[farthest + ahead + 1, width]`.
    """
    distance = torch.arange(farthest, -ahead - 1, -1, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * -(math.log(10000.0) / width))
    return torch.stack((torch.sin(distance * rate), torch.cos(distance * rate)), -1).flatten(1)


class RelativeAttention(nn.Module):
    """Self-attention with learned biases and sinusoidal relative positions (Transformer-XL)."""

    positions: Tensor

    def __init__(self, width: int, heads: int, key_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.linear_q = nn.Linear(width, width)
        self.linear_k = nn.Linear(width, width, bias=key_bias)
        self.linear_v = nn.Linear(width, width)
        self.linear_out = nn.Linear(width, width)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.empty(heads, width // heads))
        self.pos_bias_v = nn.Parameter(torch.empty(heads, width // heads))
        self.register_buffer("positions", torch.empty(0), persistent=False)
        self._farthest = 0

    def prepare(self, encoding: Tensor, farthest: int) -> None:
        """Project `encoding`, which has a row for each distance, from `farthest` down."""
        projected = self.linear_pos(encoding).unflatten(-1, (self.heads, -1))
        self.positions = projected.permute(1, 2, 0).contiguous()
        self._farthest = farthest

    def forward(self, x: Tensor, window: CacheWindow, layer: int, mask: Tensor | None) -> Tensor:
        """Map `[batch, new, width]` to the same shape; `mask` is added to the scores."""
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.linear_q, self.linear_k, self.linear_v)
        )
        keys, values = window.extend((layer,), key, value)
        new = query.shape[-2]
        columns = keys.shape[-2]
        scale = query.shape[-1] ** -0.5
        first = self._farthest - (columns - 1)
        positions = self.positions[..., first : first + columns + new]
        by_distance = ((query + self.pos_bias_v[:, None]) * scale) @ positions
        bias = _by_column(by_distance, columns)
        if mask is not None:
            bias = bias + mask
        mixed = functional.scaled_dot_product_attention(
            query + self.pos_bias_u[:, None], keys, values, attn_mask=bias, scale=scale
        )
        return self.linear_out(mixed.transpose(1, 2).flatten(-2))


def _by_column(by_distance: Tensor, columns: int) -> Tensor:
    """View scores per distance as scores per column, `[..., new, columns]`, without a copy.

    In each row of `by_distance` the distances begin with `columns - 1` and fall by one per entry.
    Column 0 has the distance `columns - 1` from the last query, so the row of this query is read
    from its first entry on. The row of the query before it is read from its second entry on, and so
    forth.
    """
    new, width = by_distance.shape[-2:]
    flat = by_distance.flatten(-2)[..., new - 1 : new - 1 + new * (width - 1)]
    return flat.reshape(*flat.shape[:-1], new, width - 1)[..., :columns]


class ConformerFeedForward(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(width, inner)
        self.w_2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return self.w_2(functional.silu(self.w_1(x)))


class ConformerLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it. This Conformer has no convolution."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width = config.output_size
        self.self_attn = RelativeAttention(width, config.attention_heads, config.key_bias)
        self.feed_forward = ConformerFeedForward(width, config.linear_units)
        self.norm_ff = nn.LayerNorm(width, eps=1e-12)
        self.norm_mha = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, window: CacheWindow, layer: int, mask: Tensor | None) -> Tensor:
        """Map `[batch, new, width]` to the same shape."""
        x = x + self.self_attn(self.norm_mha(x), window, layer, mask)
        return x + self.feed_forward(self.norm_ff(x))


class Embed(nn.Module):
    """A linear layer, a norm, and the scale sqrt(width)."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(size, width), nn.LayerNorm(width, eps=1e-5))
        self.scale = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., size]` to `[..., width]`."""
        return self.out(x) * self.scale


class Lookahead(nn.Module):
    """Two convolutions by which a token depends on the next `length` tokens."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.conv1 = TimeConv1d(width, width, length + 1)
        self.conv2 = TimeConv1d(width, width, LOOKAHEAD_TAIL + 1)

    def forward(self, x: Tensor, last: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map `[batch, new + length, width]` to `[batch, new, width]`.

        `last` is the tail of the previous chunk. Also returns the tail of this chunk.
        """
        seen = torch.cat((last, functional.leaky_relu(self.conv1(x))), 1)
        return x[:, : x.shape[1] - self.length] + self.conv2(seen), tail(seen, last.shape[1], ends)


class Upsample(nn.Module):
    """Repeat every token `stride` times, then apply a causal convolution."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = TimeConv1d(width, width, 2 * stride + 1)

    def forward(self, x: Tensor, last: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map `[batch, new, width]` to `[batch, new * stride, width]`.

        `last` is the tail of the previous chunk. Also returns the tail of this chunk.
        """
        seen = torch.cat((last, x.repeat_interleave(self.stride, 1)), 1)
        return self.conv(seen), tail(seen, last.shape[1], ends)


class UpsampleConformer(nn.Module):
    """The whole encoder, over the caches of the slots."""

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

    def forward(self, x: Tensor, batch: FlowBatch) -> Tensor:
        """Map embedded tokens `[batch, new + lookahead, input_size]` to frames.

        Returns `[batch, new * stride, output_size]`. At positions where `batch.beyond` is True
        there is no token, and the input is set to zero.
        """
        caches, slots = batch.caches, batch.slots
        x = self.embed(x)
        if batch.beyond is not None:
            x = x.masked_fill(batch.beyond[..., None], 0.0)
        last, ends = caches.lookahead_tail[slots], batch.token_ends
        x, caches.next_lookahead_tail[slots] = self.pre_lookahead_layer(x, last, ends)
        for layer, block in enumerate(self.encoders):
            x = block(x, batch.token_window, layer, batch.token_mask)
        last, ends = caches.upsample_tail[slots], batch.frame_ends
        x, caches.next_upsample_tail[slots] = self.up_layer(x, last, ends)
        x = self.up_embed(x)
        for layer, block in enumerate(self.up_encoders):
            x = block(x, batch.frame_window, layer, batch.frame_mask)
        return self.after_norm(x)
