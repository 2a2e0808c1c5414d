"""Whisper's encoder and the projector to the LLM: the modules with the checkpoint's weights.

Parameter names are those under the checkpoint's prefixes `apm.` and `audio_projection_layer.`.
Sources: Whisper (https://arxiv.org/abs/2212.04356), and
`MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.audio.mel import CONTEXT_FRAMES, CORE_FRAMES
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field, section
from duplane.worker.models.minicpm_o.layers import embedding, pack_linear

UNIT_POSITIONS = CORE_FRAMES // 2
"""Positions of one unit: the second convolution halves the frame rate."""


@dataclass(frozen=True)
class AudioConfig:
    """The fields of config.json that define the audio encoder."""

    mel_bins: int
    width: int
    layer_count: int
    head_count: int
    ffn_width: int
    position_count: int
    hidden: int
    """Hidden size of the LLM."""
    pool: int
    chunk_positions: int
    """Positions of an attention block of whole clips; 0 means attention without blocks."""

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> AudioConfig:
        """Read the checkpoint's config.json; raises `CheckpointError`."""
        audio = section(config, "audio_config")
        chunk_s = field(config, "audio_chunk_length", float)
        return cls(
            mel_bins=field(audio, "num_mel_bins", int),
            width=field(audio, "d_model", int),
            layer_count=field(audio, "encoder_layers", int),
            head_count=field(audio, "encoder_attention_heads", int),
            ffn_width=field(audio, "encoder_ffn_dim", int),
            position_count=field(audio, "max_source_positions", int),
            hidden=field(config, "hidden_size", int),
            pool=field(config, "audio_pool_step", int),
            chunk_positions=max(0, int(chunk_s * UNIT_POSITIONS)),
        )

    def __post_init__(self) -> None:
        if self.position_count < UNIT_POSITIONS:
            raise CheckpointError(
                f"audio_config.max_source_positions: {self.position_count}, "
                f"one unit needs {UNIT_POSITIONS}"
            )


class EncoderAttention(nn.Module):
    """Multi-head attention of Whisper. All projections except the key projection have a bias."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.head_count = config.head_count
        self.q_proj = nn.Linear(config.width, config.width)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width)
        self.out_proj = nn.Linear(config.width, config.width)
        self.packed_weight = self.packed_bias = torch.empty(0)

    def pack(self) -> None:
        """Store the projections of queries, keys and values as one matrix, on their device."""
        self.packed_weight, self.packed_bias = pack_linear((self.q_proj, self.k_proj, self.v_proj))

    def forward(self, hidden: Tensor, mask: Tensor | None, history: LayerHistory | None) -> Tensor:
        """Attend from [n, positions, width] to the same positions and `history`; keep the shape.

        `mask` is True where attention is allowed.
        """
        projected = functional.linear(hidden, self.packed_weight, self.packed_bias)
        heads = projected.view(*hidden.shape[:2], 3, self.head_count, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads[0], heads[1], heads[2]
        if history is not None:
            keys, values = history.extend(keys, values)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """One pre-norm layer of Whisper's encoder."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.self_attn = EncoderAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.ffn_width)
        self.fc2 = nn.Linear(config.ffn_width, config.width)
        self.final_layer_norm = nn.LayerNorm(config.width)

    def forward(
        self, hidden: Tensor, mask: Tensor | None, history: LayerHistory | None = None
    ) -> Tensor:
        """Map [n, positions, width] to the same shape; attends also to `history`, if given."""
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), mask, history)
        hidden = hidden + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(hidden))))
        if hidden.dtype == torch.float16:  # activations can exceed the range of float16
            hidden = hidden.clamp(-64504.0, 64504.0)
        return hidden


@dataclass(frozen=True)
class LayerHistory:
    """The cached keys and values of one layer, and where the units of a batch belong in the cache.

    A batch has one unit for each of its slots.
    """

    cache: Tensor
    """[2, slots, heads, capacity, head_dim]"""
    slots: slice | Tensor
    """The slots: int64 [n], or a slice if they are neighbours; then the cache is read in place."""
    rows: Tensor
    """The slots, [n, 1]."""
    columns: Tensor
    """The columns of the unit in each slot's cache, [n, positions]."""
    span: int
    """Number of columns in use in the fullest of the slots, including the unit."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the unit's keys and values [n, heads, positions, head_dim].

        Returns all cached keys and values of the slots, [n, heads, span, head_dim].
        """
        columns = self.cache.permute(1, 3, 0, 2, 4)
        columns[self.rows, self.columns] = torch.stack((keys, values), 1).permute(0, 3, 1, 2, 4)
        seen = self.cache[:, self.slots, :, : self.span]
        return seen[0], seen[1]


class WhisperEncoder(nn.Module):
    """The convolutions, positions and layers."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.mel_bins, config.width, 3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2, padding=1)
        self.embed_positions = embedding(config.position_count, config.width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layer_count))
        self.layer_norm = nn.LayerNorm(config.width)

    def pack(self) -> None:
        """Store the weights of the layers so that they need fewer matrix products."""
        for layer in self.layers:
            cast("EncoderLayer", layer).self_attn.pack()

    def convolve(
        self, features: Tensor, is_first: Tensor | None = None, ends: Tensor | None = None
    ) -> Tensor:
        """Map features [n, frames, mel_bins] to positions [n, (frames + 1) // 2, width].

        `is_first` [n] marks rows that have no left context: their first CONTEXT_FRAMES frames count
        as the zeros with which a convolution is padded. So do the frames of each row from `ends`
        [n] on.
        """
        rows = functional.gelu(self.conv1(features.to(self.conv1.weight.dtype).transpose(1, 2)))
        if is_first is not None:
            rows[:, :, :CONTEXT_FRAMES].masked_fill_(is_first[:, None, None], 0.0)
        if ends is not None:
            frames = torch.arange(rows.shape[2], device=rows.device)
            rows.masked_fill_((frames >= ends[:, None])[:, None], 0.0)
        # The result is made contiguous, because otherwise each norm of the layers would copy it.
        return functional.gelu(self.conv2(rows)).transpose(1, 2).contiguous()


class AudioProjector(nn.Module):
    """Two linear layers, from the encoder's width to the LLM's width, and average pooling."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.pool = config.pool
        self.linear1 = nn.Linear(config.width, config.hidden)
        self.linear2 = nn.Linear(config.hidden, config.hidden)

    def forward(self, states: Tensor) -> Tensor:
        """Map [n, positions, width] to embeddings [n, positions // pool, hidden]."""
        rows = self.linear2(functional.relu(self.linear1(states)))
        count = rows.shape[1] // self.pool
        return rows[:, : count * self.pool].unflatten(1, (count, self.pool)).mean(2)
