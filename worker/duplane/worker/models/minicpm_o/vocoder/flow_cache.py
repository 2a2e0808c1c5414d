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

from duplane.worker.models.minicpm_o.transfer import upload

RECENT_FRAMES = 100

IntArray = NDArray[np.int64]
SlotIndex = slice | Tensor


def slot_index(slots: Sequence[int], device: torch.device) -> SlotIndex:
    """Return an index of the slot dimension.

    For consecutive slots it is a slice, which selects a view; otherwise a tensor, which selects a
    copy.
    """
    if list(slots) == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return upload(slots, device)


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
class Row:
    """The sizes of one slot's chunk: `cached` frames, `tokens`, and `new` tokens to decode."""

    slot: int
    cached: int
    tokens: int
    new: int


def batch_of(rows: Sequence[Row], caches: FlowCaches, lookahead: int, padded: int = 0) -> FlowBatch:
    """Return the batch of these rows, whose slots must be ascending.

    If `padded` is not 0, the rows are padded to this number of new tokens.
    """
    device = caches.speaker.device
    stride = caches.stride
    slots = slot_index([row.slot for row in rows], device)
    cached, new = max(row.cached for row in rows), padded or max(row.new for row in rows)
    is_ragged = padded > 0 or any((row.cached, row.new) != (cached, new) for row in rows)
    ends = upload([row.new for row in rows], device) if is_ragged else None

    def window(cache: Tensor, capacity: int, scale: int) -> CacheWindow:
        width = new * stride // scale
        return CacheWindow(cache, slots, capacity=capacity, cached=cached // scale, new=width)

    def mask(scale: int) -> Tensor | None:
        if not is_ragged:
            return None
        starts = upload([(cached - row.cached) // scale for row in rows], device)
        stops = upload([(cached + row.new * stride) // scale for row in rows], device)
        columns = torch.arange((cached + new * stride) // scale, device=device)
        outside = (columns < starts[:, None]) | (columns >= stops[:, None])
        values = torch.zeros(outside.shape, device=device).masked_fill_(outside, -math.inf)
        return values[:, None, None]

    beyond = None
    width = new + lookahead
    if any(row.tokens != width for row in rows):
        counts = upload([row.tokens for row in rows], device)
        beyond = torch.arange(width, device=device) >= counts[:, None]
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


def move_columns(cache: Tensor, moves: Tensor) -> None:
    """Copy columns of an attention cache. All columns are read before the first is written.

    `moves` are int64 `[3, count]`: slot, source column, target column.
    """
    slots, sources, targets = moves.unbind()
    columns = cache.movedim(-2, 1)
    columns[slots, targets] = columns[slots, sources]


@dataclass(frozen=True)
class Moves:
    """Columns of one slot's cache to copy together, from `source[i]` to `target[i]`."""

    source: IntArray
    target: IntArray

    def of_slot(self, slot: int) -> IntArray:
        """Return these moves as `move_columns` expects them, `[3, count]`, for one slot."""
        return np.stack((np.full_like(self.source, slot), self.source, self.target))


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
