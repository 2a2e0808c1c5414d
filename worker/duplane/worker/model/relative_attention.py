"""Self-attention that knows how far apart query and key are, over a slotted cache.

Decides scores and positions; knows nothing about what the sequence stands for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.model.flow_cache import Window


def relative_positions(width: int, farthest: int, ahead: int) -> Tensor:
    """Sines and cosines of the distance from query to key: `farthest` first, down to `-ahead`.

    Shape `[farthest + ahead + 1, width]`.
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
        """Project the positions once: `encoding` holds the distances from `farthest` downwards."""
        projected = self.linear_pos(encoding).unflatten(-1, (self.heads, -1))
        self.positions = projected.permute(1, 2, 0).contiguous()
        self._farthest = farthest

    def forward(self, x: Tensor, window: Window, layer: int, mask: Tensor | None) -> Tensor:
        """Map `[batch, new, width]` to the same shape; `mask` is added to scores."""
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.linear_q, self.linear_k, self.linear_v)
        )
        keys, values = window.extend((layer,), key, value)
        new, columns = query.shape[-2], keys.shape[-2]
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
    """Turn scores per distance into scores per column, `[..., new, columns]`, without a copy.

    The last of `new` queries is at distance 0 from the last column; entry 0 of a query is the
    distance `columns - 1`, and each earlier query starts one further on.
    """
    new, width = by_distance.shape[-2:]
    flat = by_distance.flatten(-2)[..., new - 1 : new - 1 + new * (width - 1)]
    return flat.reshape(*flat.shape[:-1], new, width - 1)[..., :columns]
