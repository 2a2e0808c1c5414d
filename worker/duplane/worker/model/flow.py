"""The flow model: speech tokens to mel, in a voice, a chunk of several slots at a time.

Decides the solver and what a chunk leaves behind for the next; knows nothing about audio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.model.checkpoint import CheckpointError, field, section
from duplane.worker.model.conformer import ConformerConfig, UpsampleConformer
from duplane.worker.model.dit import DiT, DiTConfig
from duplane.worker.model.flow_cache import (
    Batch,
    CacheShape,
    FlowCaches,
    Row,
    batch_of,
    move_columns,
    slot_index,
)
from duplane.worker.model.flow_retention import (
    Moves,
    estimator_moves,
    frame_moves,
    token_moves,
)
from duplane.worker.model.transfer import upload


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
        """Read the `flow` mapping of flow.yaml; absent values are the reference's defaults."""
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
        """Tell what the caches depend on, for a solver of `steps` steps."""
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
    """What the caches of one slot hold: `prompt` frames at first, `columns` of the estimator."""

    prompt: int
    columns: list[int]

    @property
    def cached(self) -> int:
        """The frames that the slot's caches hold."""
        return len(self.columns)


@dataclass(frozen=True)
class FlowChunk:
    """Tokens for one slot; those of a turn's last chunk have nothing ahead to look at."""

    slot: int
    frames: TurnFrames
    tokens: Sequence[int]
    is_last: bool


def cosine_schedule(steps: int) -> tuple[list[float], list[float]]:
    """Times and lengths of the solver's steps in [0, 1], short ones first.

    In float32 and summed up step by step, as in the reference.
    """
    grid = 1 - torch.cos(torch.linspace(0, 1, steps + 1, device="cpu") * 0.5 * torch.pi)
    time, times, lengths = grid[0], list[float](), list[float]()
    for following in grid[1:]:
        length = following - time
        times.append(time.item())
        lengths.append(length.item())
        time = time + length
    return times, lengths


class Solver(nn.Module):
    """Euler steps from noise to mel, each with and without the condition (CFG)."""

    def __init__(self, config: FlowConfig, steps: int) -> None:
        super().__init__()
        self.estimator = DiT(config.estimator)
        self.rate = config.inference_cfg_rate
        self.times, self.lengths = cosine_schedule(steps)

    def forward(self, noise: Tensor, conditions: Tensor, batch: Batch) -> Tensor:
        """Map noise `[batch, new, mel]` and `[batch, new, 3 * mel]` to `[batch, new, mel]`."""
        projected = self.estimator.project(conditions)
        x = noise
        for step, length in enumerate(self.lengths):
            given, free = self.estimator(x, projected, batch, step).unbind(2)
            x = x + length * ((1.0 + self.rate) * given - self.rate * free)
        return x


class Flow(nn.Module):
    """The whole model; parameters are named as in flow.pt."""

    def __init__(self, config: FlowConfig, steps: int) -> None:
        super().__init__()
        self.config = config
        self.stride = config.encoder.up_stride
        self.lookahead = config.encoder.pre_lookahead_len
        self.input_embedding = nn.Embedding(config.vocab_size, config.input_size)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, config.output_size)
        self.encoder = UpsampleConformer(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.output_size, config.output_size)
        self.decoder = Solver(config, steps)

    def prepare(self, columns: int, chunk: int) -> None:
        """Compute what does not depend on input: positions up to `columns` frames, time steps."""
        self.encoder.prepare(columns, chunk)
        self.decoder.estimator.prepare(self.decoder.times)

    def speaker(self, embedding: Tensor) -> Tensor:
        """Map a speaker embedding `[spk_embed_dim]` to `[mel]`."""
        return self.spk_embed_affine_layer(functional.normalize(embedding, dim=-1))

    def encoded(self, token_count: int, is_last: bool) -> int:
        """Count the tokens that become mel: the lookahead does not, unless nothing follows."""
        return token_count if is_last else token_count - self.lookahead

    def forward(
        self, chunks: Sequence[FlowChunk], caches: FlowCaches, noise: Tensor, mel: Tensor | None
    ) -> Tensor:
        """Turn one chunk per slot, in rising order of slots, into `[batch, frames, mel]`.

        Rows are padded to the longest; row `b` has `encoded * stride` frames. `noise` is
        `[columns, mel]`: a chunk starts at the entry that equals its cached frames. `mel` is
        `[batch, frames, mel]`, the known mel of a prompt. The caches see the new frames, but
        `retain` decides what stays of them.
        """
        rows = [
            Row(c.slot, c.frames.cached, len(c.tokens), self.encoded(len(c.tokens), c.is_last))
            for c in chunks
        ]
        batch = batch_of(rows, caches, self.lookahead)
        width = max(row.new for row in rows) + self.lookahead
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
        """Keep what the next chunk of each slot will see, and count it in `chunk.frames`."""
        token_places: list[NDArray[np.int64]] = []
        frame_places: list[NDArray[np.int64]] = []
        estimator_places: list[NDArray[np.int64]] = []
        listed: list[list[int]] = []
        for chunk in chunks:
            frames, stride = chunk.frames, self.stride
            cached, prompt = frames.cached, frames.prompt
            tokens = self.encoded(len(chunk.tokens), chunk.is_last)
            new, capacity = tokens * stride, caches.capacity
            by_token = token_moves(cached // stride, tokens, prompt, caches.token_capacity, stride)
            by_frame = frame_moves(cached, new, prompt, capacity)
            columns, by_estimator = estimator_moves(frames.columns, new, prompt, capacity)
            listed.append(columns)
            token_places.append(_places(chunk.slot, by_token))
            frame_places.append(_places(chunk.slot, by_frame))
            estimator_places.append(_places(chunk.slot, by_estimator))
        device = caches.speaker.device
        moves = (
            (caches.token_attention, token_places),
            (caches.frame_attention, frame_places),
            (caches.estimator_attention, estimator_places),
        )
        move_columns(
            [(cache, upload(np.concatenate(places, 1), device)) for cache, places in moves]
        )
        caches.keep_tails(slot_index([chunk.slot for chunk in chunks], device))
        for chunk, columns in zip(chunks, listed, strict=True):
            chunk.frames.columns = columns


def prompt_frames(prompt: int, capacity: int) -> TurnFrames:
    """Describe caches that hold a prompt of `prompt` frames, computed as one chunk, and no more."""
    return TurnFrames(prompt, list(range(capacity - prompt, capacity)))


def _places(slot: int, moves: Moves) -> NDArray[np.int64]:
    slots = np.full_like(moves.source, slot)
    return np.stack((slots, moves.source, moves.target))
