"""The state of the flow model between two chunks of a turn: caches, and which frames they keep.

A turn keeps as many frames as its voice's prompt has, plus `RECENT_FRAMES`. Each kind of cache
keeps different frames, by rules that look arbitrary. They are copied exactly, because they
determine the output of the released vocoder. Sources: `setup_cache` and `inference_chunk` of the
package `stepaudio2` in minicpmo-utils 1.0.6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RECENT_FRAMES = 100

IntArray = NDArray[np.int64]
SlotIndex = slice | Tensor


@dataclass(frozen=True)
class CacheShape:
    """The dimensions of a flow model that determine the size of its caches."""

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
    """All state tensors of the flow model, slots first, allocated once.

    Attention caches are `[slots, (steps,) layers, 2 (key, value), heads, columns, head width]`.
    Cached frames end before column `capacity`, and the frames of a chunk follow, so a column has
    the same distance to the chunk in every slot. The estimator computes each frame with and without
    its condition, so its head dimension has `2 * heads` entries.

    A tail is the last input of a convolution, which the next chunk needs. A chunk reads the tails
    of the previous chunk and writes the `next_` tails. So the chunk can be computed again until
    `keep_tails` is called.
    """

    def __init__(
        self, shape: CacheShape, slots: int, *, capacity: int, chunk: int, device: torch.device
    ) -> None:
        """Allocate for at most `capacity` cached frames and chunks of at most `chunk` frames."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros((slots, *size), device=device)

        self.capacity = capacity
        self.stride = shape.stride
        self.token_capacity = capacity // shape.stride
        frames = capacity + chunk
        tokens = (capacity + chunk) // shape.stride
        head = shape.width // shape.conformer_heads
        heads, pairs = shape.conformer_heads, 2 * shape.estimator_heads
        self.speaker = zeros(shape.speaker_width)
        self.lookahead_tail = zeros(2, shape.width)
        self.upsample_tail = zeros(2 * shape.stride, shape.width)
        self.token_attention = zeros(shape.conformer_layers, 2, heads, tokens, head)
        self.frame_attention = zeros(shape.upsampled_layers, 2, heads, frames, head)
        steps = (shape.steps, shape.estimator_layers)
        self.estimator_tails = zeros(*steps, 2, 2, 2, shape.estimator_width)
        # The slots of one layer are adjacent in memory, so that kernels index less than 2 GiB.
        stored = (*steps, 2, slots, pairs, frames, shape.estimator_head_width)
        self.estimator_attention = torch.zeros(stored, device=device).movedim(3, 0)
        tails = (self.lookahead_tail, self.upsample_tail, self.estimator_tails)
        self.next_lookahead_tail, self.next_upsample_tail, self.next_estimator_tails = (
            torch.zeros_like(tail) for tail in tails
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All state tensors, each with the slot dimension first."""
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
        """Let the next chunk of these slots read the tails that their last chunk wrote."""
        self.lookahead_tail[slots] = self.next_lookahead_tail[slots]
        self.upsample_tail[slots] = self.next_upsample_tail[slots]
        self.estimator_tails[slots] = self.next_estimator_tails[slots]

    def copy_slot(self, slot: int, source: FlowCaches, index: int, frames: int) -> None:
        """Copy slot `index` of `source`, in which only one chunk, of `frames` frames, was run."""
        tokens = frames // self.stride
        for mine, theirs in zip(self.tensors[:3], source.tensors[:3], strict=True):
            mine[slot] = theirs[index]
        self.estimator_tails[slot] = source.estimator_tails[index]
        for mine, theirs, end, count in (
            (self.token_attention, source.token_attention, self.token_capacity, tokens),
            (self.frame_attention, source.frame_attention, self.capacity, frames),
            (self.estimator_attention, source.estimator_attention, self.capacity, frames),
        ):
            mine[slot, ..., end - count : end, :] = theirs[index, ..., :count, :]


class CacheWindow:
    """The columns of an attention cache to which a chunk attends: cached ones and its own."""

    def __init__(
        self, cache: Tensor, slots: SlotIndex, *, capacity: int, cached: int, new: int
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._seen = slice(capacity - cached, capacity + new)
        self._new = slice(capacity, capacity + new)

    def extend(self, index: tuple[int, ...], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the chunk's keys and values; return the keys and values of all columns.

        `index` is the layer; for the estimator it is the solver step and the layer. Maps
        `[batch, heads, new, width]` to `[batch, heads, cached + new, width]`.
        """
        slots, cache = self._slots, self._cache
        cache[(slots, *index, 0, slice(None), self._new)] = key
        cache[(slots, *index, 1, slice(None), self._new)] = value
        seen = (slice(None), self._seen)
        return cache[(slots, *index, 0, *seen)], cache[(slots, *index, 1, *seen)]


@dataclass(frozen=True)
class FlowBatch:
    """One chunk of several slots, padded to the longest cache and the longest chunk.

    Ends and masks are None if no row is padded.

    - `token_ends`, `frame_ends`, int64 `[batch]`: the numbers of valid tokens and frames of a row.
    - `token_mask`, `frame_mask`, float `[batch, 1, 1, columns]`: minus infinity for unused columns.
    - `beyond`, bool `[batch, new + lookahead]`: True after the last token of a row.
    """

    caches: FlowCaches
    slots: SlotIndex
    token_window: CacheWindow
    frame_window: CacheWindow
    estimator_window: CacheWindow
    token_ends: Tensor | None
    frame_ends: Tensor | None
    token_mask: Tensor | None
    frame_mask: Tensor | None
    beyond: Tensor | None


@dataclass(frozen=True)
class FlowForm:
    """What is fixed in a launch of the flow model; all sizes are those after padding.

    - `rows`: the number of chunks. `tokens`: the new tokens of each.
    - `cached`: the number of cached frames that are read.
    - `moved`: how many columns of the caches of tokens, frames and estimator move in each row.
    - `first_slot`: set if the slots are consecutive. So the caches are read in place.
    - `is_padded`: rows may have fewer cached frames or new tokens.
    - `is_short`: rows may have fewer tokens than `tokens` and the lookahead.
    """

    rows: int
    tokens: int
    cached: int
    moved: tuple[int, int, int] = (0, 0, 0)
    first_slot: int | None = None
    is_padded: bool = True
    is_short: bool = True


@dataclass(frozen=True)
class FlowNumbers:
    """The numbers of a launch, int64, in this order; each has a row for each chunk.

    - `slots`, `cached`, `new` and `counts` `[rows, 1]`: the slot, the number of its cached frames,
      of its new tokens, and of its tokens with the lookahead.
    - `tokens` `[rows, tokens + lookahead]`.
    - `moves`: source and target columns `[rows, moved]` of each of the three kinds of caches.
    """

    slots: Tensor
    cached: Tensor
    new: Tensor
    counts: Tensor
    tokens: Tensor
    moves: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, numbers: Tensor, form: FlowForm, lookahead: int) -> FlowNumbers:
        """Split the columns of `numbers`."""
        moved = [size for size in form.moved for _ in range(2)]
        sizes = [1, 1, 1, 1, form.tokens + lookahead, *moved]
        split: list[Tensor] = list(torch.split(numbers, sizes, 1))
        slots, cached, new, counts, tokens, *ends = split
        moves = list(zip(ends[::2], ends[1::2], strict=True))
        return cls(slots, cached, new, counts, tokens, moves)


def batch_of(form: FlowForm, numbers: FlowNumbers, caches: FlowCaches) -> FlowBatch:
    """Return the batch of a launch. Its slots must be ascending if they are read in place."""
    device, stride, cached = caches.speaker.device, caches.stride, form.cached
    slots: SlotIndex = numbers.slots[:, 0]
    if form.first_slot is not None:
        slots = slice(form.first_slot, form.first_slot + form.rows)

    def window(cache: Tensor, capacity: int, scale: int) -> CacheWindow:
        width = form.tokens * stride // scale
        return CacheWindow(cache, slots, capacity=capacity, cached=cached // scale, new=width)

    def mask(scale: int) -> Tensor | None:
        if not form.is_padded:
            return None
        starts = (cached - numbers.cached) // scale
        stops = (cached + numbers.new * stride) // scale
        columns = torch.arange((cached + form.tokens * stride) // scale, device=device)
        outside = (columns < starts) | (columns >= stops)
        values = torch.zeros(outside.shape, device=device).masked_fill_(outside, -math.inf)
        return values[:, None, None]

    beyond = None
    if form.is_short:
        beyond = torch.arange(numbers.tokens.shape[1], device=device) >= numbers.counts
    ends = numbers.new[:, 0] if form.is_padded else None
    return FlowBatch(
        caches=caches,
        slots=slots,
        token_window=window(caches.token_attention, caches.token_capacity, stride),
        frame_window=window(caches.frame_attention, caches.capacity, 1),
        estimator_window=window(caches.estimator_attention, caches.capacity, 1),
        token_ends=ends,
        frame_ends=None if ends is None else ends * stride,
        token_mask=mask(stride),
        frame_mask=mask(1),
        beyond=beyond,
    )


def move_columns(cache: Tensor, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy columns of an attention cache. All columns are read before the first is written.

    `slots` `[rows, 1]`, `sources` and `targets` `[rows, count]` are int64.
    """
    columns = cache.movedim(-2, 1)
    columns[slots, targets] = columns[slots, sources]


@dataclass(frozen=True)
class Moves:
    """Columns of one slot's cache to copy together, from `source[i]` to `target[i]`."""

    source: IntArray
    target: IntArray

    def padded(self, count: int) -> IntArray:
        """Return sources and targets `[2 * count]`; the first move is repeated, or column 0."""
        ends = np.zeros((2, count), np.int64)
        if len(self.source):
            ends[:] = [[self.source[0]], [self.target[0]]]
        ends[:, : len(self.source)] = self.source, self.target
        return ends.ravel()


def kept_length(length: int, prompt: int) -> int:
    """Return how many of a turn's `length` frames are kept, if its prompt has `prompt` frames."""
    return min(length, prompt + RECENT_FRAMES)


def frame_moves(cached: int, new: int, prompt: int, capacity: int) -> Moves:
    """Plan the moves for Conformer layers after the upsampling.

    These layers keep the frames of the prompt and the most recent frames.
    """
    length = cached + new
    kept = np.arange(length)
    if length > kept_length(length, prompt):
        kept = np.concatenate((kept[:prompt], kept[-RECENT_FRAMES:]))
    return _shift(kept, cached, capacity)


def token_moves(cached: int, new: int, prompt: int, capacity: int, stride: int) -> Moves:
    """Plan the moves for Conformer layers before the upsampling.

    The reference repeats the list of these layers' tokens `stride` times, so that all caches have
    the same length. It drops entries of this list as it drops frames. Then it uses only the first
    1 / `stride` of the remaining list. Here only the tokens in this part are kept.

    `cached`, `new` and `capacity` are numbers of tokens; `prompt` is a number of frames.
    """
    length = cached + new
    kept = np.arange(length)
    frames = length * stride
    if frames > kept_length(frames, prompt):
        stored = np.tile(kept, stride)
        stored = np.concatenate((stored[:prompt], stored[-RECENT_FRAMES:]))
        kept = stored[: len(stored) // stride]
    return _shift(kept, cached, capacity)


def estimator_moves(
    columns: Sequence[int], new: int, prompt: int, capacity: int
) -> tuple[list[int], Moves]:
    """Plan the moves for the layers of the estimator.

    In these layers the reference lists the frames of a new chunk, in time order, before all older
    frames. Of this list it keeps the first `prompt` and the last `RECENT_FRAMES` entries, although
    the last entries are the oldest frames. This code does the same.

    `columns` has the column of each frame in the list before the new chunk. The `new` frames are in
    the columns from `capacity` on. Attention does not depend on the order of columns, so only new
    frames move, into columns that are no longer used. Returns the columns of the new list, which
    are always the last ones before `capacity`, and the moves.
    """
    listed = [*range(capacity, capacity + new), *columns]
    if len(listed) > kept_length(len(listed), prompt):
        listed = listed[:prompt] + listed[-RECENT_FRAMES:]
    source = [column for column in listed if column >= capacity]
    dropped = sorted(set(columns).difference(listed), reverse=True)
    unused = range(capacity - len(columns) - 1, capacity - len(listed) - 1, -1)
    target = [*dropped, *unused]
    moved = dict(zip(source, target, strict=True))
    moves = Moves(np.array(source, np.int64), np.array(target, np.int64))
    return [moved.get(column, column) for column in listed], moves


def _shift(kept: IntArray, cached: int, capacity: int) -> Moves:
    """Plan moves of the frames `kept` (0 is the oldest) to the last columns before `capacity`."""
    return Moves(kept + (capacity - cached), np.arange(capacity - len(kept), capacity))
