"""The transformer decoder of the LLM (Qwen3) and of the talker (Llama): one module for both.

Rows of all slots in a batch are packed one after the other; only attention tells them apart.
Parameter names are the checkpoint's own. Knows nothing about tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.model.cache import KVCache, Rows, Run
from duplane.worker.model.checkpoint import CheckpointError, field


@dataclass(frozen=True)
class DecoderConfig:
    """The dimensions of one decoder; `has_head_norm` is what sets Qwen3 apart from Llama."""

    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    key_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    has_head_norm: bool
    has_attention_bias: bool

    @classmethod
    def from_json(
        cls, config: Mapping[str, Any], *, has_head_norm: bool, rope_theta: float
    ) -> DecoderConfig:
        """Read the names both architectures share; `rope_theta` is the architecture's default."""
        heads = field(config, "num_attention_heads", int)
        key_heads = field(config, "num_key_value_heads", int, heads)
        hidden = field(config, "hidden_size", int)
        if heads < 1 or key_heads < 1 or heads % key_heads:
            raise CheckpointError(f"{heads} attention heads over {key_heads} key heads")
        activation = field(config, "hidden_act", str, "silu")
        if activation != "silu":
            raise CheckpointError(f"hidden_act {activation!r} is not supported")
        rope = cast("dict[str, Any]", config.get("rope_parameters") or {})
        scaling = cast("dict[str, Any]", config.get("rope_scaling") or rope)
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise CheckpointError(f"rope scaling {scaling!r} is not supported")
        return cls(
            hidden_size=hidden,
            intermediate_size=field(config, "intermediate_size", int),
            layers=field(config, "num_hidden_layers", int),
            query_heads=heads,
            key_heads=key_heads,
            head_dim=field(config, "head_dim", int, hidden // heads),
            rope_theta=field({**config, **rope}, "rope_theta", float, rope_theta),
            norm_eps=field(config, "rms_norm_eps", float, 1e-6),
            has_head_norm=has_head_norm,
            has_attention_bias=field(config, "attention_bias", bool, False),
        )

    def cache(
        self, slot_count: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        """Allocate the cache that goes with a decoder of these dimensions."""
        return KVCache(
            layers=self.layers,
            slots=slot_count,
            heads=self.key_heads,
            queries_per_head=self.query_heads // self.key_heads,
            capacity=capacity,
            head_dim=self.head_dim,
            device=device,
            dtype=dtype,
        )


def linear(
    inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype
) -> nn.Linear:
    """A linear layer whose weights are allocated and left for a checkpoint to fill."""
    make = cast("Any", nn.utils).skip_init  # untyped in torch
    return make(nn.Linear, inputs, outputs, bias=bias, device=device, dtype=dtype)


def embedding(rows: int, width: int, *, device: torch.device, dtype: torch.dtype) -> nn.Embedding:
    """An embedding table that is allocated and left for a checkpoint to fill."""
    make = cast("Any", nn.utils).skip_init  # untyped in torch
    return make(nn.Embedding, rows, width, device=device, dtype=dtype)


class Rotary:
    """Cosines and sines of the rotary angles of all positions, float32 `[capacity, head_dim]`."""

    def __init__(self, config: DecoderConfig, capacity: int, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        angles = torch.arange(capacity, device=device).float()[:, None] * frequencies
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines `[rows, 1, head_dim]` for the rows at `positions`."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def turn(self, keys: Tensor, source: int, target: int) -> Tensor:
        """Keys `[..., rows, head_dim]` rotated for `source` and after, rotated for `target`.

        One rotation by the difference of the two positions' own angles, so that a key turned
        is as close to one computed at its new place as float32 allows.
        """
        old, new = (slice(start, start + keys.shape[-2]) for start in (source, target))
        cos = self.cos[new] * self.cos[old] + self.sin[new] * self.sin[old]
        sin = self.sin[new] * self.cos[old] - self.cos[new] * self.sin[old]
        return rotate(keys, cos, sin)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[..., head_dim]` in float32; `sin` carries the sign of the half turn."""
    exact = states.float()
    half = exact.shape[-1] // 2
    return (exact * cos + exact.roll(half, -1) * sin).to(states.dtype)


class Attention(nn.Module):
    """Grouped-query attention of packed rows over the slotted cache."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = (
            config.query_heads,
            config.key_heads,
            config.head_dim,
        )
        hidden, bias = config.hidden_size, config.has_attention_bias
        width, key_width = self.heads * self.head_dim, self.key_heads * self.head_dim
        self.q_proj = linear(hidden, width, bias=bias, device=device, dtype=dtype)
        self.k_proj = linear(hidden, key_width, bias=bias, device=device, dtype=dtype)
        self.v_proj = linear(hidden, key_width, bias=bias, device=device, dtype=dtype)
        self.o_proj = linear(width, hidden, bias=bias, device=device, dtype=dtype)
        self.has_head_norm = config.has_head_norm
        if self.has_head_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps, device=device, dtype=dtype)

    def forward(
        self, states: Tensor, turn: tuple[Tensor, Tensor], rows: Rows, cache: KVCache, layer: int
    ) -> Tensor:
        count = states.shape[0]
        queries: Tensor = self.q_proj(states).view(count, self.heads, self.head_dim)
        keys: Tensor = self.k_proj(states).view(count, self.key_heads, self.head_dim)
        values: Tensor = self.v_proj(states).view(count, self.key_heads, self.head_dim)
        if self.has_head_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate(queries, *turn), rotate(keys, *turn)
        cache.write(layer, rows, keys, values)
        mixed = [self._attend(queries, run, *cache.view(layer, run)) for run in rows.runs]
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return self.o_proj(joined)

    def _attend(self, queries: Tensor, run: Run, keys: Tensor, values: Tensor) -> Tensor:
        """Attend for one run; the query heads of a group are extra rows of their key head."""
        slots, rows, dim = run.slot_count, run.rows_per_slot, self.head_dim
        own = queries[run.first_row : run.first_row + slots * rows]
        grouped = own.view(slots, rows, self.key_heads, -1, dim).permute(0, 2, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            grouped.reshape(slots, self.key_heads, -1, dim), keys, values, attn_mask=run.mask
        )
        split = mixed.view(slots, self.key_heads, -1, rows, dim).permute(0, 3, 1, 2, 4)
        return split.reshape(slots * rows, self.heads * dim)


class FeedForward(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = linear(hidden, inner, bias=False, device=device, dtype=dtype)
        self.up_proj = linear(hidden, inner, bias=False, device=device, dtype=dtype)
        self.down_proj = linear(inner, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    """Attention and feed-forward, each behind its norm and beside its residual."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps, device=device, dtype=dtype)
        self.self_attn = Attention(config, device, dtype)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps, device=device, dtype=dtype)
        self.mlp = FeedForward(config, device, dtype)

    def forward(
        self, states: Tensor, turn: tuple[Tensor, Tensor], rows: Rows, cache: KVCache, layer: int
    ) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), turn, rows, cache, layer)
        return states + self.mlp(self.post_attention_layernorm(states))


class Decoder(nn.Module):
    """All layers and the final norm, with the cache they share."""

    def __init__(
        self,
        config: DecoderConfig,
        slot_count: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, device, dtype) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps, device=device, dtype=dtype)
        self.cache = config.cache(slot_count, capacity, device, dtype)
        self._rotary = Rotary(config, capacity + 1, device)

    def forward(self, embeds: Tensor, rows: Rows) -> Tensor:
        """Run embeddings `[rows, hidden]` placed by `cache.extend`; return them normed."""
        turn = self._rotary.at(rows.positions)
        for index, layer in enumerate(self.layers):
            embeds = layer(embeds, turn, rows, self.cache, index)
        return self.norm(embeds)

    def move(self, slot: int, source: int, target: int) -> None:
        """Move the slot's rows from `source` on to `target` and after, as if they had been there.

        Their values remain what they were computed from, rows that may be gone since.
        """
        self.cache.move(slot, source, target, self._rotary.turn)
