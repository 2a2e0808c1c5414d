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

from duplane.worker.models.minicpm_o.blocks.block import Numbers
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field, section
from duplane.worker.models.minicpm_o.layers import embedding
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
    FlowForm,
    FlowNumbers,
    Moves,
    batch_of,
    estimator_moves,
    frame_moves,
    move_columns,
    token_moves,
)

MOVED_COLUMNS = 128
"""Maximum number of columns of the estimator's caches that are moved in one step. It bounds the
temporary copy."""
AllMoves = tuple[Moves, Moves, Moves]
"""The moves in the caches of tokens, of frames and of the estimator."""
NO_MOVES = Moves(np.zeros(0, np.int64), np.zeros(0, np.int64))


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
    """One chunk of a slot's tokens. All chunks of a turn but the last have a lookahead.

    After a prompt no frames move within the caches: they stay where `FlowCaches.copy_slot` reads.
    """

    slot: int
    frames: TurnFrames
    tokens: Sequence[int]
    is_last: bool
    is_prompt: bool = False


@dataclass(frozen=True)
class FlowPlan:
    """A launch: its form, its numbers, and the columns of the estimator after each chunk."""

    form: FlowForm
    numbers: Numbers
    columns: Sequence[list[int]]


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

    def plan(
        self, chunks: Sequence[FlowChunk], caches: FlowCaches, padded: FlowForm | None = None
    ) -> FlowPlan:
        """Plan a launch with one chunk per slot, slots ascending.

        Without `padded`, the form has the sizes of the longest chunk and the longest cache. If
        `padded` has more rows than there are chunks, the others repeat the first row.
        """
        kept = [self._kept(chunk, caches) for chunk in chunks]
        rows = [
            (
                chunk.slot,
                len(chunk.frames.columns),
                self.encoded(len(chunk.tokens), chunk.is_last),
                len(chunk.tokens),
            )
            for chunk in chunks
        ]
        moves = [found for _, found in kept]
        form = padded or self._form(rows, moves)
        width = form.tokens + self.lookahead
        numbers = [
            np.concatenate(
                (
                    row,
                    chunk.tokens,
                    np.zeros(width - len(chunk.tokens), np.int64),
                    *(each.padded(size) for each, size in zip(found, form.moved, strict=True)),
                )
            )
            for chunk, row, found in zip(chunks, rows, moves, strict=True)
        ]
        numbers += numbers[:1] * (form.rows - len(chunks))
        return FlowPlan(form, np.stack(numbers), [columns for columns, _ in kept])

    def _kept(self, chunk: FlowChunk, caches: FlowCaches) -> tuple[list[int], AllMoves]:
        """Return the estimator's columns after a chunk, and the moves in the three caches."""
        frames, stride, capacity = chunk.frames, self.stride, caches.capacity
        if chunk.is_last or chunk.is_prompt:
            return frames.columns, (NO_MOVES, NO_MOVES, NO_MOVES)
        cached, prompt = len(frames.columns), frames.prompt
        tokens = self.encoded(len(chunk.tokens), chunk.is_last)
        new = tokens * stride
        columns, by_estimator = estimator_moves(frames.columns, new, prompt, capacity)
        by_token = token_moves(cached // stride, tokens, prompt, caches.token_capacity, stride)
        return columns, (by_token, frame_moves(cached, new, prompt, capacity), by_estimator)

    def _form(self, rows: Sequence[Sequence[int]], moves: Sequence[AllMoves]) -> FlowForm:
        """Return the form with the sizes of the longest rows, which begin as in `FlowNumbers`."""
        slots, cached, new, counts = zip(*rows, strict=True)
        by_token, by_frame, by_estimator = (
            max(len(each[kind].source) for each in moves) for kind in range(3)
        )
        is_neighbours = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        return FlowForm(
            rows=len(rows),
            tokens=max(new),
            cached=max(cached),
            moved=(by_token, by_frame, by_estimator),
            first_slot=slots[0] if is_neighbours else None,
            is_padded=len(set(zip(cached, new, strict=True))) > 1,
            is_short=any(count != max(new) + self.lookahead for count in counts),
        )

    def forward(
        self,
        form: FlowForm,
        numbers: Tensor,
        caches: FlowCaches,
        noise: Tensor,
        mel: Tensor | None = None,
    ) -> Tensor:
        """Map a chunk of each slot to mel `[rows, frames, mel]`, and keep the next one's state.

        - `numbers`: those of a plan. A row has `new * stride` valid frames.
        - `noise` `[columns, mel]`: a chunk begins at the column that is the number of its cached
          frames.
        - `mel` `[rows, frames, mel]`: the known mel of a prompt, or None.

        The frames that the next chunk needs are moved within `caches` at the end, so the call can
        be repeated if it fails.
        """
        given = FlowNumbers.of(numbers, form, self.lookahead)
        batch = batch_of(form, given, caches)
        embedded = self.input_embedding(given.tokens)
        mu = self.encoder_proj(self.encoder(embedded, batch))
        speaker = caches.speaker[batch.slots][:, None].expand_as(mu)
        known = torch.zeros_like(mu) if mel is None else mel
        columns = given.cached + torch.arange(mu.shape[1], device=noise.device)
        drawn = noise[columns.clamp_(max=len(noise) - 1)]
        result = self.decoder(drawn, torch.cat((mu, speaker, known), -1), batch)
        by_tokens, by_frames, (sources, targets) = given.moves
        move_columns(caches.token_attention, given.slots, *by_tokens)
        move_columns(caches.frame_attention, given.slots, *by_frames)
        # No target column of the estimator is also a source, so the moves can be done in parts.
        share = max(1, MOVED_COLUMNS // form.rows)
        for start in range(0, sources.shape[1], share):
            part = slice(start, start + share)
            move_columns(
                caches.estimator_attention, given.slots, sources[:, part], targets[:, part]
            )
        caches.keep_tails(batch.slots)
        return result
