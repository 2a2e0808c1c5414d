"""The networks of the listener: the worker's own modules, run over whole sessions in one pass.

The listener consists of the audio encoder and the LLM. The encoder gets the features of the
worker's mel stream; its mask gives the same attention as the worker's cache. The cache of the LLM
holds only the current pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.audio.encoder import AudioEncoder
from duplane.worker.models.minicpm_o.audio.mel import CONTEXT_FRAMES, UNIT_SAMPLES
from duplane.worker.models.minicpm_o.audio.whisper import (
    UNIT_POSITIONS,
    AudioConfig,
    EncoderAttention,
)
from duplane.worker.models.minicpm_o.llm.attention import Rows, causal_mask
from duplane.worker.models.minicpm_o.llm.decoder import Attention, Decoder, GatedFeedForward
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from duplane.worker.models.types import FloatArray

DEVICE = torch.device("cpu")
MOST_ROWS = 1024
"""Rows of the longest sequence."""
TABLE_SPREAD = 0.1
_CONTEXT_POSITIONS = CONTEXT_FRAMES // 2


class OnePass(KVCache):
    """A cache for training: it holds keys and values of the current pass, with gradients."""

    def __init__(self, cache: KVCache) -> None:
        self._pool_shape = layers, heads, _, head_dim = cache.keys.shape
        super().__init__(
            layers=layers,
            slots=1,
            heads=heads,
            queries_per_head=cache.queries_per_head,
            capacity=1,
            head_dim=head_dim,
            device=cache.keys.device,
            dtype=cache.keys.dtype,
        )
        self._mask = causal_mask(torch.zeros(1), 1, torch.float32)
        self._shape = 1, 1

    def begin(self, count: int, length: int) -> Rows:
        """Plan a pass over `count` sequences of `length` rows, each with causal attention."""
        positions = torch.arange(length)
        self._shape = count, length
        self._mask = causal_mask(positions.repeat(self.queries_per_head), length, torch.float32)
        # A tensor for each layer: a layer must not change what an earlier one needs for gradients.
        _, heads, _, head_dim = self._pool_shape
        self.keys, self.values = (self._new(heads, count * length, head_dim) for _ in range(2))
        last = torch.arange(1, count + 1) * length - 1
        return Rows(positions.repeat(count), slice(0, count * length), last, ())

    def _new(self, heads: int, rows: int, head_dim: int) -> Any:
        return [torch.empty(heads, rows, head_dim) for _ in range(self._pool_shape[0])]

    def attend(self, layer: int, rows: Rows, queries: Tensor) -> Tensor:
        """Attend to the keys and values of the current pass."""
        del rows
        pools = self.keys[layer], self.values[layer]
        shape = len(pools[0]), *self._shape, pools[0].shape[-1]
        keys, values = (pool.view(shape).transpose(0, 1) for pool in pools)
        parted = *self._shape, keys.shape[1], self.queries_per_head, keys.shape[3]
        own = queries.reshape(parted).permute(0, 2, 3, 1, 4)
        result = functional.scaled_dot_product_attention(
            own.flatten(2, 3), keys, values, attn_mask=self._mask
        )
        return result.view(own.shape).permute(0, 3, 1, 2, 4).reshape(queries.shape)


def use_one_pass(decoder: Decoder) -> OnePass:
    """Replace the decoder's cache by one for training."""
    decoder.cache = cache = OnePass(decoder.cache)
    return cache


def run_decoder(decoder: Decoder, embeds: Tensor) -> Tensor:
    """Run sequences of embeddings [sequences, length, width]; return normed states."""
    count, length, width = embeds.shape
    assert isinstance(decoder.cache, OnePass)
    rows = decoder.cache.begin(count, length)
    return decoder(embeds.reshape(-1, width), rows).view(count, length, width)


def trainable(module: nn.Module) -> list[nn.Parameter | Tensor]:
    """Return the tensors to train: parameters, and the packed tensors of attention and MLPs."""
    found: list[nn.Parameter | Tensor] = [p for p in module.parameters() if p.requires_grad]
    for part in module.modules():
        if isinstance(part, Attention | GatedFeedForward):
            found.append(part.inputs.weight.requires_grad_())
        elif isinstance(part, EncoderAttention):
            found += [part.packed_weight.requires_grad_(), part.packed_bias.requires_grad_()]
    return found


@torch.no_grad()
def draw_weights(module: nn.Module, seed: int) -> None:
    """Draw matrices, scaled by their number of inputs. Set norms to 1 and biases to 0."""
    generator = torch.Generator().manual_seed(seed)
    residual = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight")
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        spread = 1.0 / math.sqrt(math.prod(parameter.shape[1:]))
        if "embed" in name or "emb_" in name:
            spread = TABLE_SPREAD
        if name.endswith(residual):
            spread /= 3.0
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(drawn * spread)


@dataclass
class ListenerNetworks:
    """The listener: audio encoder with projector, and LLM."""

    audio: AudioEncoder
    llm: LanguageModel

    @classmethod
    def build(cls, config: dict[str, Any], seed: int, *, batch: int) -> ListenerNetworks:
        """Build the networks with random weights, for at most `batch` sessions per pass."""
        audio = AudioEncoder(AudioConfig.from_json(config), batch)
        llm = LanguageModel(config, 1, MOST_ROWS, DEVICE, torch.float32)
        draw_weights(audio, seed)
        draw_weights(llm, seed + 1)
        use_one_pass(llm.model)
        return cls(audio, llm)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules, with their prefixes in the checkpoint."""
        projector = self.audio.audio_projection_layer
        return {"llm.": self.llm, "apm.": self.audio.apm, "audio_projection_layer.": projector}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint, by their names in it. It may have other tensors too."""
        for prefix, module in self.modules.items():
            names = module.state_dict()
            module.load_state_dict({name: tensors[prefix + name].float() for name in names})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with their names in the checkpoint."""
        for prefix, module in self.modules.items():
            for name, value in module.state_dict().items():
                yield prefix + name, value

    @torch.no_grad()
    def features(self, sessions: Sequence[FloatArray]) -> tuple[Tensor, Tensor]:
        """Compute the features [sessions, units, frames, mel] of sessions of equal length.

        The second result marks the first unit of each session. Both results come from the worker's
        mel stream.
        """
        mel, slots = self.audio.mel, list(range(len(sessions)))
        units: list[Tensor] = []
        first: list[list[bool]] = []
        for start in range(0, len(sessions[0]), UNIT_SAMPLES):
            for slot, samples in zip(slots, sessions, strict=True):
                mel.push(slot, np.ascontiguousarray(samples[start : start + UNIT_SAMPLES]))
                mel.take(slot)
            features, is_first = mel.features(slots)
            units.append(features)
            first.append(is_first)
        for slot in slots:
            mel.reset(slot)
        return torch.stack(units, 1), torch.tensor(first).T

    def encode(self, features: Tensor, is_first: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Encode features of whole sessions, in windows of `window` units.

        Returns the encoder's states [sessions, units * 50, width] and the embeddings
        [sessions, units * 10, hidden].
        """
        apm = self.audio.apm
        sessions, units = features.shape[:2]
        rows = apm.convolve(features.flatten(0, 1), is_first.flatten())
        rows = rows[:, _CONTEXT_POSITIONS : _CONTEXT_POSITIONS + UNIT_POSITIONS]
        size = min(window, units)
        span = size * UNIT_POSITIONS
        rows = rows.reshape(sessions * units // size, span, -1)
        rows = rows + apm.embed_positions.weight[:span]
        blocks = torch.arange(span) // UNIT_POSITIONS
        mask = blocks[None, :] <= blocks[:, None]
        for layer in apm.layers:
            rows = layer(rows, mask)
        states = apm.layer_norm(rows)
        embeds = self.audio.audio_projection_layer(states)
        return states.reshape(sessions, -1, states.shape[-1]), embeds.reshape(
            sessions, -1, embeds.shape[-1]
        )
