"""The flow model: maps speech tokens to mel frames in a voice, for chunks of a batch of slots.

Sources: CosyVoice 2 (https://arxiv.org/abs/2412.10117), conditional flow matching
(https://arxiv.org/abs/2210.02747) with classifier-free guidance, and
`CausalMaskedDiffWithXvec` of the package `stepaudio2` in minicpmo-utils 1.0.6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field, section
from duplane.worker.models.minicpm_o.layers import embedding
from duplane.worker.models.minicpm_o.transfer import upload
from duplane.worker.models.minicpm_o.vocoder.conformer import (
    ConformerConfig,
    TimeConv1d,
    UpsampleConformer,
)
from duplane.worker.models.minicpm_o.vocoder.dit import DiT, DiTConfig
from duplane.worker.models.minicpm_o.vocoder.flow_cache import (
    CacheShape,
    FlowBatch,
    FlowCaches,
    IntArray,
    Row,
    batch_of,
    estimator_moves,
    frame_moves,
    move_columns,
    slot_index,
    token_moves,
)

MOVED_COLUMNS = 128
"""Maximum number of columns of the estimator's caches that are moved in one step. It bounds the
temporary copy."""


@dataclass(frozen=True)
class FlowConfig:
    """Dimensions of the flow model, named as in flow.yaml."""

    input_size: int
    output_size: int
    spk_embed_dim: int
    vocab_size: int
    inference_cfg_rate: float
    encoder: ConformerConfig
    estimator: DiTConfig

    @classmethod
    def from_yaml(cls, config: Mapping[str, Any]) -> FlowConfig:
        """Read `flow` of flow.yaml; absent fields have the defaults of the reference."""
        decoder = section(config, "decoder")
        built = cls(
            input_size=field(config, "input_size", int, 512),
            output_size=field(config, "output_size", int, 80),
            spk_embed_dim=field(config, "spk_embed_dim", int, 192),
            vocab_size=field(config, "vocab_size", int, 5121),
            inference_cfg_rate=field(decoder, "inference_cfg_rate", float, 0.7),
            encoder=ConformerConfig.from_yaml(section(config, "encoder")),
            estimator=DiTConfig.from_yaml(section(decoder, "estimator")),
        )
        if built.estimator.out_channels != built.output_size:
            raise CheckpointError("flow.decoder.estimator.out_channels is not flow.output_size")
        if built.encoder.input_size != built.input_size:
            raise CheckpointError("flow.encoder.input_size is not flow.input_size")
        return built

    def cache_shape(self, steps: int) -> CacheShape:
        """Return the dimensions of the caches, for a solver of `steps` steps."""
        return CacheShape(
            width=self.encoder.output_size,
            conformer_heads=self.encoder.attention_heads,
            conformer_layers=self.encoder.num_blocks,
            upsampled_layers=self.encoder.num_up_blocks,
            stride=self.encoder.up_stride,
            estimator_width=self.estimator.hidden_size,
            estimator_heads=self.estimator.num_heads,
            estimator_head_width=self.estimator.head_dim,
            estimator_layers=self.estimator.depth,
            steps=steps,
            speaker_width=self.output_size,
        )


@dataclass
class TurnFrames:
    """The cached frames of one slot: the length of its prompt, and the columns of the estimator."""

    prompt: int
    columns: list[int]

    @classmethod
    def of_prompt(cls, prompt: int, capacity: int) -> TurnFrames:
        """Describe caches that hold only a prompt of `prompt` frames, computed as one chunk."""
        return cls(prompt, list(range(capacity - prompt, capacity)))


@dataclass(frozen=True)
class FlowChunk:
    """One chunk of a slot's tokens. All chunks of a turn but the last have a lookahead."""

    slot: int
    frames: TurnFrames
    tokens: Sequence[int]
    is_last: bool


def cosine_schedule(steps: int) -> tuple[list[float], list[float]]:
    """Compute the times and lengths of the solver's steps in [0, 1], short steps first.

    As in the reference, the values are float32 and are summed step by step.
    """
    grid = 1 - torch.cos(torch.linspace(0, 1, steps + 1, device="cpu") * 0.5 * torch.pi)
    time = grid[0]
    times = list[float]()
    lengths = list[float]()
    for following in grid[1:]:
        length = following - time
        times.append(time.item())
        lengths.append(length.item())
        time = time + length
    return times, lengths


class Solver(nn.Module):
    """Euler steps from noise to mel, with classifier-free guidance."""

    def __init__(self, config: FlowConfig, steps: int) -> None:
        super().__init__()
        self.estimator = DiT(config.estimator)
        self.rate = config.inference_cfg_rate
        self.times, self.lengths = cosine_schedule(steps)

    def forward(self, noise: Tensor, conditions: Tensor, batch: FlowBatch) -> Tensor:
        """Map noise `[batch, new, mel]` and conditions `[batch, new, 3 * mel]` to mel."""
        projected = self.estimator.project(conditions)
        x = noise
        for step, length in enumerate(self.lengths):
            given, free = self.estimator(x, projected, batch, step).unbind(2)
            x = x + length * ((1.0 + self.rate) * given - self.rate * free)
        return x


class Flow(nn.Module):
    """The whole flow model. Its parameters are named as in flow.pt."""

    def __init__(self, config: FlowConfig, steps: int) -> None:
        super().__init__()
        self.config = config
        self.stride = config.encoder.up_stride
        self.lookahead = config.encoder.pre_lookahead_len
        self.input_embedding = embedding(config.vocab_size, config.input_size)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, config.output_size)
        self.encoder = UpsampleConformer(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.output_size, config.output_size)
        self.decoder = Solver(config, steps)

    def prepare(self, columns: int, chunk: int) -> None:
        """Compute the time steps, and the positions for `columns` cached and `chunk` new frames."""
        self.encoder.prepare(columns, chunk)
        self.decoder.estimator.prepare(self.decoder.times)
        for module in self.modules():
            if isinstance(module, TimeConv1d):
                module.prepare()

    def speaker(self, embedding: Tensor) -> Tensor:
        """Map a speaker embedding `[spk_embed_dim]` to `[mel]`."""
        return self.spk_embed_affine_layer(functional.normalize(embedding, dim=-1))

    def encoded(self, token_count: int, is_last: bool) -> int:
        """Return how many tokens of a chunk become mel.

        In the last chunk these are all tokens, in other chunks all but the lookahead.
        """
        return token_count if is_last else token_count - self.lookahead

    def forward(
        self,
        chunks: Sequence[FlowChunk],
        caches: FlowCaches,
        noise: Tensor,
        mel: Tensor | None,
        padded: int = 0,
    ) -> Tensor:
        """Map one chunk per slot, slots ascending, to mel `[batch, frames, mel]`.

        - `noise` `[columns, mel]`: a chunk begins at the column that is the number of its cached
          frames.
        - `mel` `[batch, frames, mel]`: the known mel of a prompt, or None.
        - `padded`: the tokens of each row after padding. 0 means the tokens of the longest row. A
          row has `encoded * stride` valid frames.

        The caches hold the new frames behind their capacity until `retain` is called.
        """
        rows = [
            Row(
                c.slot, len(c.frames.columns), len(c.tokens), self.encoded(len(c.tokens), c.is_last)
            )
            for c in chunks
        ]
        batch = batch_of(rows, caches, self.lookahead, padded)
        width = (padded or max(row.new for row in rows)) + self.lookahead
        tokens = np.zeros((len(rows), width), np.int64)
        for row, chunk in zip(tokens, chunks, strict=True):
            row[: len(chunk.tokens)] = chunk.tokens
        device = noise.device
        embedded = self.input_embedding(upload(tokens, device))
        mu = self.encoder_proj(self.encoder(embedded, batch))
        speaker = caches.speaker[batch.slots][:, None].expand_as(mu)
        known = torch.zeros_like(mu) if mel is None else mel
        starts = upload([row.cached for row in rows], device)
        columns = starts[:, None] + torch.arange(mu.shape[1], device=device)
        drawn = noise[columns.clamp_(max=len(noise) - 1)]
        return self.decoder(drawn, torch.cat((mu, speaker, known), -1), batch)

    def retain(self, chunks: Sequence[FlowChunk], caches: FlowCaches) -> None:
        """Keep the frames that each slot's next chunk needs: move them within `caches`."""
        moves: tuple[list[IntArray], ...] = ([], [], [])
        listed: list[list[int]] = []
        for chunk in chunks:
            frames = chunk.frames
            stride = self.stride
            cached = len(frames.columns)
            prompt = frames.prompt
            tokens = self.encoded(len(chunk.tokens), chunk.is_last)
            new = tokens * stride
            capacity = caches.capacity
            by_token = token_moves(cached // stride, tokens, prompt, caches.token_capacity, stride)
            by_frame = frame_moves(cached, new, prompt, capacity)
            columns, by_estimator = estimator_moves(frames.columns, new, prompt, capacity)
            listed.append(columns)
            for found, of_cache in zip((by_token, by_frame, by_estimator), moves, strict=True):
                of_cache.append(found.of_slot(chunk.slot))
        device = caches.speaker.device
        sent = [upload(np.concatenate(of_cache, 1), device) for of_cache in moves]
        move_columns(caches.token_attention, sent[0])
        move_columns(caches.frame_attention, sent[1])
        # No target column of the estimator is also a source, so the moves can be done in parts.
        for start in range(0, sent[2].shape[1], MOVED_COLUMNS):
            part = sent[2][:, start : start + MOVED_COLUMNS]
            move_columns(caches.estimator_attention, part)
        caches.keep_tails(slot_index([chunk.slot for chunk in chunks], device))
        for chunk, columns in zip(chunks, listed, strict=True):
            chunk.frames.columns = columns
