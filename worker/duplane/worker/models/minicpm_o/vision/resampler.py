"""The resampler: maps the states of a tile's patches to a fixed number of embeddings.

Parameter names are those under the checkpoint's prefix `resampler.`. Source:
`MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf, after the adapter
of Qwen-VL (https://arxiv.org/abs/2308.12966).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.layers import linear

HEAD_DIM = 128
_EPS = 1e-6
_MAX_PERIOD = 10_000


class PackedAttention(nn.Module):
    """The parameters of `nn.MultiheadAttention`: queries, keys and values in one matrix."""

    def __init__(self, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_count = max(1, hidden // HEAD_DIM)
        self.in_proj_weight = nn.Parameter(
            torch.empty((3 * hidden, hidden), device=device, dtype=dtype)
        )
        self.in_proj_bias = nn.Parameter(torch.empty(3 * hidden, device=device, dtype=dtype))
        self.out_proj = linear(hidden, hidden, bias=True, device=device, dtype=dtype)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from queries [rows, hidden] to keys and values [n, patches, hidden].

        `mask` [n, 1, 1, patches] is False for padding. Returns [n, rows, hidden].
        """
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        query, key, value = (
            self._heads(functional.linear(states, weight, bias))
            for states, weight, bias in zip((queries, keys, values), weights, biases, strict=True)
        )
        mixed = functional.scaled_dot_product_attention(
            query.expand(len(keys), -1, -1, -1), key, value, attn_mask=mask
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, states: Tensor) -> Tensor:
        """Map [..., rows, hidden] to [..., heads, rows, head_dim]."""
        return states.view(*states.shape[:-1], self.head_count, -1).transpose(-2, -3)


class Resampler(nn.Module):
    """Learned queries that attend to a tile's patches, with 2D sinusoidal positions."""

    def __init__(
        self,
        query_count: int,
        hidden: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        heads = max(1, hidden // HEAD_DIM)
        if hidden % (4 * heads):
            raise CheckpointError(f"hidden_size {hidden} is not a multiple of {4 * heads}")
        self.hidden = hidden
        self.query = nn.Parameter(torch.empty((query_count, hidden), device=device, dtype=dtype))
        self.kv_proj: nn.Module = nn.Identity()
        if width != hidden:
            self.kv_proj = linear(width, hidden, bias=False, device=device, dtype=dtype)
        self.attn = PackedAttention(hidden, device, dtype)
        self.ln_q = nn.LayerNorm(hidden, _EPS, device=device, dtype=dtype)
        self.ln_kv = nn.LayerNorm(hidden, _EPS, device=device, dtype=dtype)
        self.ln_post = nn.LayerNorm(hidden, _EPS, device=device, dtype=dtype)
        self.proj = nn.Parameter(torch.empty((hidden, hidden), device=device, dtype=dtype))

    def forward(
        self, states: Tensor, rows: Tensor, columns: Tensor, side: int, mask: Tensor | None
    ) -> Tensor:
        """Map encoder states [n, patches, width] to embeddings [n, query_count, hidden].

        `rows` and `columns` [n, patches] are the positions of the patches in the tile, all below
        `side`. `mask` [n, 1, 1, patches] is False for padding.
        """
        values = self.ln_kv(self.kv_proj(states))
        table = self._positions(side, values)
        keys = values + torch.cat((table[columns], table[rows]), dim=-1)
        mixed = self.attn(self.ln_q(self.query), keys, values, mask)
        return self.ln_post(mixed) @ self.proj

    def _positions(self, side: int, like: Tensor) -> Tensor:
        """Compute sines and cosines [side, hidden / 2] of positions; the angles are float32."""
        quarter = self.hidden // 4
        exponents = torch.arange(quarter, device=like.device, dtype=torch.float32) / quarter
        positions = torch.arange(side, device=like.device, dtype=torch.float32)
        angles = positions[:, None] * (1.0 / _MAX_PERIOD**exponents)
        return torch.cat((angles.sin(), angles.cos()), dim=-1).to(like.dtype)
