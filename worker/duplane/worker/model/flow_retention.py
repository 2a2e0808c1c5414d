"""Which frames of a turn its attention caches keep, and where: pure functions over lengths.

A turn keeps as many frames as its prompt has, plus `RECENT_FRAMES`. Which ones these are differs
by cache and is part of what the released vocoder computes, odd as it is: every function here says
what it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RECENT_FRAMES = 100

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Moves:
    """Columns of one slot's cache to copy, all at once: `source[i]` to `target[i]`."""

    source: IntArray
    target: IntArray


def kept_length(length: int, prompt: int) -> int:
    """Count the frames that stay of `length`, with a prompt of `prompt` frames."""
    return min(length, prompt + RECENT_FRAMES)


def frame_moves(cached: int, new: int, prompt: int, capacity: int) -> Moves:
    """Conformer layers behind the upsampling: keep the prompt and the most recent frames."""
    length = cached + new
    kept = np.arange(length)
    if length > kept_length(length, prompt):
        kept = np.concatenate((kept[:prompt], kept[-RECENT_FRAMES:]))
    return _shift(kept, cached, capacity)


def token_moves(cached: int, new: int, prompt: int, capacity: int, stride: int) -> Moves:
    """Conformer layers before the upsampling: what is left of frames that are tokens repeated.

    The reference stores the tokens `stride` times over to give both kinds of layer one length,
    cuts that as if it were frames, and reads the front part of it. All arguments but `prompt`,
    in frames, count tokens.
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
    """Estimator layers: list the chunk before older frames, keep `prompt` in front, the rest last.

    Within a chunk frames are listed in time order. `columns` are those of the frames so far, in
    that order; the new frames lie at `capacity` and on. Attention there does not depend on order,
    so that only the frames of the chunk move, to where others are dropped. Returns the columns
    after it, which are always the last ones before `capacity`.
    """
    listed = [*range(capacity, capacity + new), *columns]
    if len(listed) > kept_length(len(listed), prompt):
        listed = listed[:prompt] + listed[-RECENT_FRAMES:]
    source = [column for column in listed if column >= capacity]
    dropped = sorted(set(columns).difference(listed), reverse=True)
    unused = range(capacity - len(columns) - 1, capacity - len(listed) - 1, -1)
    target = [*dropped, *unused]
    place = dict(zip(source, target, strict=True))
    moves = Moves(np.array(source, np.int64), np.array(target, np.int64))
    return [place.get(column, column) for column in listed], moves


def _shift(kept: IntArray, cached: int, capacity: int) -> Moves:
    """Move the frames that stay, counted from the oldest one, up to the end at `capacity`."""
    return Moves(kept + (capacity - cached), np.arange(capacity - len(kept), capacity))
