"""The transformer decoder of the LLM (Qwen3) and of the talker (Llama): one module for both.

The rows of all slots in a batch are packed one after the other, [rows, hidden]; only attention
separates the slots. Parameters are named as in the checkpoint. The decoder gets embeddings, not
tokens. Sources: Qwen3 (https://arxiv.org/abs/2505.09388), Llama
(https://arxiv.org/abs/2302.13971) and rotary positions (https://arxiv.org/abs/2104.09864).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field
from duplane.worker.models.minicpm_o.layers import Product, Storage, embedding, linear
from duplane.worker.models.minicpm_o.llm.attention import Rows
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.llm.operations import Operations, rotate


@dataclass(frozen=True)
class DecoderConfig:
    """The dimensions of one decoder. `has_head_norm` is true for Qwen3 and false for Llama."""

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
    def from_json(cls, config: Mapping[str, Any], *, has_head_norm: bool) -> DecoderConfig:
        """Read the dimensions of either architecture."""
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
            rope_theta=field({**config, **rope}, "rope_theta", float, 10_000.0),
            norm_eps=field(config, "rms_norm_eps", float, 1e-6),
            has_head_norm=has_head_norm,
            has_attention_bias=field(config, "attention_bias", bool, False),
        )


class Rotary(nn.Module):
    """Cosines and sines of the rotary angles of all positions, float32 `[capacity, head_dim]`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig, capacity: int, device: torch.device) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        angles = torch.arange(capacity, device=device).float()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[rows, 1, head_dim]` for rows at these positions.

        The first half of the sines is negative.
        """
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def rotate(self, keys: Tensor, source: int, target: int) -> Tensor:
        """Rotate keys `[..., rows, head_dim]` from positions at `source` on to `target` on.

        Each key is rotated once, by the difference of the tabulated angles of its two positions.
        So it differs only by float32 rounding from a key computed at the new position.
        """
        old, new = (slice(start, start + keys.shape[-2]) for start in (source, target))
        cos = self.cos[new] * self.cos[old] + self.sin[new] * self.sin[old]
        sin = self.sin[new] * self.cos[old] - self.cos[new] * self.sin[old]
        return rotate(keys, cos, sin)


class Attention(nn.Module):
    """Grouped-query attention of packed rows over the cache."""

    def __init__(self, config: DecoderConfig, operations: Operations, storage: Storage) -> None:
        super().__init__()
        self._operations = operations
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.has_attention_bias
        width, key_width = config.query_heads * self.head_dim, config.key_heads * self.head_dim
        self.q_proj = linear(hidden, width, bias=bias, **storage)
        self.k_proj = linear(hidden, key_width, bias=bias, **storage)
        self.v_proj = linear(hidden, key_width, bias=bias, **storage)
        self.o_proj = linear(width, hidden, bias=bias, **storage)
        self.inputs = Product(self.q_proj, self.k_proj, self.v_proj)
        self.output = Product(self.o_proj)
        self.has_head_norm = config.has_head_norm
        if self.has_head_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps, **storage)
            self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps, **storage)

    def forward(
        self, states: Tensor, angles: tuple[Tensor, Tensor], rows: Rows, cache: KVCache, layer: int
    ) -> Tensor:
        """Write the rows' keys and values to the cache, then attend; return `[rows, hidden]`."""
        heads = self.inputs(states).view(len(states), -1, self.head_dim)
        norms = (self.q_norm, self.k_norm) if self.has_head_norm else None
        pools = cache.keys[layer], cache.values[layer]
        queries = self._operations.place_heads(heads, norms, angles, rows.places, *pools)
        return self.output(cache.attend(layer, rows, queries).flatten(1))


class GatedFeedForward(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: DecoderConfig, operations: Operations, storage: Storage) -> None:
        super().__init__()
        self._operations = operations
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = linear(hidden, inner, bias=False, **storage)
        self.up_proj = linear(hidden, inner, bias=False, **storage)
        self.down_proj = linear(inner, hidden, bias=False, **storage)
        self.inputs = Product(self.gate_proj, self.up_proj)
        self.output = Product(self.down_proj)

    def forward(self, states: Tensor) -> Tensor:
        """Map `[rows, hidden]` to `[rows, hidden]`."""
        return self.output(self._operations.silu_times_up(self.inputs(states)))


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, config: DecoderConfig, operations: Operations, storage: Storage) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps, **storage)
        self.self_attn = Attention(config, operations, storage)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps, **storage)
        self.mlp = GatedFeedForward(config, operations, storage)

    def forward(
        self, states: Tensor, angles: tuple[Tensor, Tensor], rows: Rows, cache: KVCache, layer: int
    ) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), angles, rows, cache, layer)
        return states + self.mlp(self.post_attention_layernorm(states))


class Decoder(nn.Module):
    """All layers and the final norm, with the cache of all layers."""

    def __init__(
        self,
        config: DecoderConfig,
        slot_count: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        share: float = 1.0,
        vocabulary: int = 0,
    ) -> None:
        """Reserve `share` of each context. With a `vocabulary` there is a table of embeddings."""
        super().__init__()
        storage = Storage(device=device, dtype=dtype)
        inner, has_head_norm = config.intermediate_size, config.has_head_norm
        self.operations = Operations(inner, has_head_norm=has_head_norm)
        self.layers = nn.ModuleList(
            [Layer(config, self.operations, storage) for _ in range(config.layers)]
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps, **storage)
        if vocabulary:
            width = config.hidden_size
            self.embed_tokens = embedding(vocabulary, width, **storage)
        self.cache = KVCache(
            layers=config.layers,
            slots=slot_count,
            heads=config.key_heads,
            queries_per_head=config.query_heads // config.key_heads,
            capacity=capacity,
            head_dim=config.head_dim,
            **storage,
            share=share,
        )
        self._rotary = Rotary(config, capacity, device)

    def forward(self, embeds: Tensor, rows: Rows) -> Tensor:
        """Map embeddings `[rows, hidden]` to normed states. `rows` come from `cache.extend`."""
        angles = self._rotary.at(rows.positions)
        for index, layer in enumerate(self.layers):
            embeds = layer(embeds, angles, rows, self.cache, index)
        return self.norm(embeds)

    def use_kernels(self, name: str) -> None:
        """Use the Triton kernels that agree with torch on this decoder's device."""
        self.operations.use_kernels(self.cache, name)

    def move(self, slot: int, source: int, target: int) -> None:
        """Move the slot's rows from `source` on so that they begin at `target`; rotate their keys.

        Keys and values are not computed again, even if they depend on rows that are dropped.
        """
        self.cache.move(slot, source, target, self._rotary.rotate)
