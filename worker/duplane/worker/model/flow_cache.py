"""The memory of the flow model: what each slot keeps between two chunks of a turn.

Decides where keys and values lie and which of them survive a chunk; knows nothing about the
layers that compute them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SlotIndex = slice | Tensor


def slot_index(slots: Sequence[int], device: torch.device) -> SlotIndex:
    """Index the slot dimension: neighbouring slots are a slice (a view), others are gathered."""
    if list(slots) == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, device=device)


@dataclass(frozen=True)
class CacheShape:
    """The dimensions of a flow model that its caches depend on."""

    width: int
    conformer_heads: int
    conformer_layers: int
    upsampled_layers: int
    stride: int
    estimator_width: int
    estimator_heads: int
    estimator_head_width: int
    estimator_layers: int
    steps: int
    speaker_width: int


class FlowCaches:
    """Every state tensor of the flow model, slots first, allocated once.

    Attention caches are `[slots, (steps,) layers, 2 (key, value), heads, columns, head width]`.
    Cached frames end at column `capacity`, a chunk's own frames follow from there, so that columns
    stand for the same distance in every slot. The estimator runs each frame with and without its
    condition; both share the head dimension, `2 * heads` wide. A chunk reads the tails of the one
    before and writes the `next_` ones: until `keep_tails` it can be computed again.
    """

    def __init__(
        self, shape: CacheShape, slots: int, *, capacity: int, chunk: int, device: torch.device
    ) -> None:
        """Hold at most `capacity` frames and, behind them, a chunk of at most `chunk` frames."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros((slots, *size), device=device)

        self.capacity = capacity
        self.stride = shape.stride
        self.token_capacity = capacity // shape.stride
        frames, tokens = capacity + chunk, (capacity + chunk) // shape.stride
        head = shape.width // shape.conformer_heads
        heads, pairs = shape.conformer_heads, 2 * shape.estimator_heads
        self.speaker = zeros(shape.speaker_width)
        self.lookahead_tail = zeros(2, shape.width)
        self.upsample_tail = zeros(2 * shape.stride, shape.width)
        self.token_attention = zeros(shape.conformer_layers, 2, heads, tokens, head)
        self.frame_attention = zeros(shape.upsampled_layers, 2, heads, frames, head)
        steps = (shape.steps, shape.estimator_layers)
        self.estimator_tails = zeros(*steps, 2, 2, 2, shape.estimator_width)
        self.estimator_attention = zeros(*steps, 2, pairs, frames, shape.estimator_head_width)
        tails = (self.lookahead_tail, self.upsample_tail, self.estimator_tails)
        self.next_lookahead_tail, self.next_upsample_tail, self.next_estimator_tails = (
            torch.zeros_like(tail) for tail in tails
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, each with the slot dimension first."""
        return (
            self.speaker,
            self.lookahead_tail,
            self.upsample_tail,
            self.token_attention,
            self.frame_attention,
            self.estimator_tails,
            self.estimator_attention,
            self.next_lookahead_tail,
            self.next_upsample_tail,
            self.next_estimator_tails,
        )

    def keep_tails(self, slots: SlotIndex) -> None:
        """Let the next chunk of these slots begin with the tails that the last one ended with."""
        self.lookahead_tail[slots] = self.next_lookahead_tail[slots]
        self.upsample_tail[slots] = self.next_upsample_tail[slots]
        self.estimator_tails[slots] = self.next_estimator_tails[slots]

    def copy_slot(self, slot: int, source: FlowCaches, place: int, frames: int) -> None:
        """Take over `frames` frames that were computed as one chunk at a place of `source`."""
        tokens = frames // self.stride
        for mine, theirs in zip(self.tensors[:3], source.tensors[:3], strict=True):
            mine[slot] = theirs[place]
        self.estimator_tails[slot] = source.estimator_tails[place]
        for mine, theirs, end, count in (
            (self.token_attention, source.token_attention, self.token_capacity, tokens),
            (self.frame_attention, source.frame_attention, self.capacity, frames),
            (self.estimator_attention, source.estimator_attention, self.capacity, frames),
        ):
            mine[slot, ..., end - count : end, :] = theirs[place, ..., :count, :]


class Window:
    """The columns of one attention cache that a chunk sees: `cached` ones and its own `new`."""

    def __init__(
        self, cache: Tensor, slots: SlotIndex, *, capacity: int, cached: int, new: int
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._seen = slice(capacity - cached, capacity + new)
        self._new = slice(capacity, capacity + new)

    def extend(self, place: tuple[int, ...], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the chunk's own keys and values; return those of all columns.

        `place` is the layer (behind the solver step, in the estimator). Shapes
        `[batch, heads, new, width]` in, `[batch, heads, cached + new, width]` out.
        """
        slots, cache = self._slots, self._cache
        cache[(slots, *place, 0, slice(None), self._new)] = key
        cache[(slots, *place, 1, slice(None), self._new)] = value
        seen = (slice(None), self._seen)
        return cache[(slots, *place, 0, *seen)], cache[(slots, *place, 1, *seen)]


@dataclass(frozen=True)
class Batch:
    """One chunk of several slots at once, padded to the longest cache and the longest chunk.

    Ends and masks are None where no row is padded. `token_ends`, `frame_ends`: int64 `[batch]`,
    how many tokens and frames each row really has. `token_mask`, `frame_mask`: float `[batch, 1,
    1, columns]`, minus infinity where a column holds nothing for a row. `beyond`: boolean
    `[batch, new + lookahead]`, the positions behind the last token of a row.
    """

    caches: FlowCaches
    slots: SlotIndex
    token_window: Window
    frame_window: Window
    estimator_window: Window
    token_ends: Tensor | None
    frame_ends: Tensor | None
    token_mask: Tensor | None
    frame_mask: Tensor | None
    beyond: Tensor | None


@dataclass(frozen=True)
class Row:
    """What one slot brings to a batch: `cached` frames, `tokens` in, `new` of them encoded."""

    slot: int
    cached: int
    tokens: int
    new: int


def batch_of(rows: Sequence[Row], caches: FlowCaches, lookahead: int) -> Batch:
    """Lay out one chunk of each row; `rows` name different slots in rising order."""
    device, stride = caches.speaker.device, caches.stride
    slots = slot_index([row.slot for row in rows], device)
    cached, new = max(row.cached for row in rows), max(row.new for row in rows)
    is_ragged = any((row.cached, row.new) != (cached, new) for row in rows)
    ends = torch.tensor([row.new for row in rows], device=device) if is_ragged else None

    def window(cache: Tensor, capacity: int, scale: int) -> Window:
        width = new * stride // scale
        return Window(cache, slots, capacity=capacity, cached=cached // scale, new=width)

    def mask(scale: int) -> Tensor | None:
        if not is_ragged:
            return None
        starts = torch.tensor([(cached - row.cached) // scale for row in rows], device=device)
        stops = torch.tensor([(cached + row.new * stride) // scale for row in rows], device=device)
        columns = torch.arange((cached + new * stride) // scale, device=device)
        outside = (columns < starts[:, None]) | (columns >= stops[:, None])
        return torch.zeros(outside.shape, device=device).masked_fill_(outside, -math.inf)[
            :, None, None
        ]

    return Batch(
        caches=caches,
        slots=slots,
        token_window=window(caches.token_attention, caches.token_capacity, stride),
        frame_window=window(caches.frame_attention, caches.capacity, 1),
        estimator_window=window(caches.estimator_attention, caches.capacity, 1),
        token_ends=ends,
        frame_ends=None if ends is None else ends * stride,
        token_mask=mask(stride),
        frame_mask=mask(1),
        beyond=_beyond([row.tokens for row in rows], new + lookahead, device),
    )


def _beyond(tokens: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    if all(count == width for count in tokens):
        return None
    counts = torch.tensor(tokens, device=device)
    return torch.arange(width, device=device) >= counts[:, None]


def move_columns(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy columns of attention caches, all reads before all writes.

    A move is a cache and its places, int64 `[3, count]`: slot, source column, target column.
    """
    read: list[tuple[Tensor, Tensor, Tensor]] = []
    for cache, places in moves:
        columns = cache.movedim(-2, 1)
        read.append((columns, places, columns[places[0], places[1]]))
    for columns, places, values in read:
        columns[places[0], places[2]] = values
