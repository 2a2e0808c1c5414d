"""Whisper's encoder and the projector behind it: the modules that hold the checkpoint's weights.

Pure functions of their input; conversations, caches and mel live with the callers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.model.checkpoint import CheckpointError, field, section
from duplane.worker.model.mel import CONTEXT_FRAMES, CORE_FRAMES

UNIT_POSITIONS = CORE_FRAMES // 2
"""Encoder positions of one unit: the second convolution halves the frame rate."""


@dataclass(frozen=True)
class AudioConfig:
    """The parts of config.json that shape the audio encoder."""

    mel_bins: int
    width: int
    layer_count: int
    head_count: int
    ffn_width: int
    position_count: int
    hidden: int
    """Width of the decoder the embeddings are for."""
    pool: int
    chunk_positions: int
    """Attention block of the whole-clip path; 0: every position sees every other."""

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> AudioConfig:
        """Read from the checkpoint's whole config.json; raises `CheckpointError`."""
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
    """Multi-head attention of Whisper: biases everywhere but on the keys."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.head_count = config.head_count
        self.q_proj = nn.Linear(config.width, config.width)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width)
        self.out_proj = nn.Linear(config.width, config.width)

    def keys_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, heads, positions, head_dim] of hidden states."""
        return self._heads(self.k_proj(hidden)), self._heads(self.v_proj(hidden))

    def forward(self, hidden: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from hidden [n, positions, width]; the mask is True where a key is seen."""
        queries = self._heads(self.q_proj(hidden))
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:2], self.head_count, -1).transpose(1, 2)


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
        """Hidden states [n, positions, width]; with a history, attend to that as well."""
        normed = self.self_attn_layer_norm(hidden)
        keys, values = self.self_attn.keys_values(normed)
        if history is not None:
            keys, values = history.extend(keys, values)
        hidden = hidden + self.self_attn(normed, keys, values, mask)
        hidden = hidden + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(hidden))))
        if hidden.dtype == torch.float16:  # the trained activations outgrow it
            hidden = hidden.clamp(-64504.0, 64504.0)
        return hidden


@dataclass(frozen=True)
class LayerHistory:
    """One layer's cached keys and values for some slots, as one unit sees them."""

    cache: Tensor
    """[2, slots, heads, capacity, head_dim]"""
    rows: Tensor
    """[n, 1]: the slots"""
    columns: Tensor
    """[n, positions]: where the unit goes in each slot's cache"""
    span: int
    """Columns in use by the longest of the slots, the unit included."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the unit's keys and values; return all of the slots', padded to the longest."""
        self.cache[0].transpose(1, 2)[self.rows, self.columns] = keys.transpose(1, 2)
        self.cache[1].transpose(1, 2)[self.rows, self.columns] = values.transpose(1, 2)
        slots = self.rows[:, 0]
        return self.cache[0, slots, :, : self.span], self.cache[1, slots, :, : self.span]


class WhisperEncoder(nn.Module):
    """Parameters and layers under the checkpoint's prefix `apm.`; holds no conversation."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.mel_bins, config.width, 3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.position_count, config.width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layer_count))
        self.layer_norm = nn.LayerNorm(config.width)

    def convolve(self, features: Tensor, is_first: Tensor | None = None) -> Tensor:
        """Positions [n, (frames + 1) // 2, width] of features [n, frames, mel_bins].

        Rows marked `is_first` start CONTEXT_FRAMES later: those frames are to act as the
        zeros that pad a convolution.
        """
        rows = functional.gelu(self.conv1(features.to(self.conv1.weight.dtype).transpose(1, 2)))
        if is_first is not None:
            rows[:, :, :CONTEXT_FRAMES].masked_fill_(is_first[:, None, None], 0.0)
        return functional.gelu(self.conv2(rows)).transpose(1, 2)


class AudioProjector(nn.Module):
    """Under the prefix `audio_projection_layer.`: from the encoder's width to the decoder's."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.pool = config.pool
        self.linear1 = nn.Linear(config.width, config.hidden)
        self.linear2 = nn.Linear(config.hidden, config.hidden)

    def forward(self, states: Tensor) -> Tensor:
        """Embeddings [n, positions // pool, hidden] of encoder states [n, positions, width]."""
        rows = self.linear2(functional.relu(self.linear1(states)))
        count = rows.shape[1] // self.pool
        return rows[:, : count * self.pool].unflatten(1, (count, self.pool)).mean(2)
