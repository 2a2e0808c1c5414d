"""The slotted KV cache. It is allocated once; the rows of a slot are reset, never freed.

This module also plans which rows a forward pass writes, and which slots attend in one call. The
lengths are kept on the host, so planning never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.transfer import upload

MOVED_ROWS = 256
"""Maximum number of rows that are moved in one step, which bounds the memory that a move needs."""
GATHERED_BYTES = 1 << 30
"""Maximum number of bytes of one layer's cache that are copied to attend for several slots in one
call."""
MASK_STRIDE = 16
"""The rows of a mask begin at multiples of this many columns, as attention kernels require."""


class CacheFullError(Exception):
    """A slot has no room for the requested rows. Nothing was changed."""


@dataclass(frozen=True)
class Group:
    """Slots that attend in one call, each with `rows_per_slot` query rows.

    - `rows`: the packed rows of these slots, slot after slot. A slot with fewer rows than others
      repeats its last row.
    - `slots`: the indices of the slots in the cache.
    - `length`: the number of rows of the longest context, including new rows.
    - `mask` [slots, 1, query rows, length] is added to the scores: 0 for rows to which a query row
      attends, else -inf. Without a mask every query row attends to all rows.
    """

    rows: slice | Tensor
    slots: slice | Tensor
    slot_count: int
    rows_per_slot: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class Rows:
    """The packed rows of one forward pass, slot after slot.

    - `slots`, `positions` [rows]: the cache slot and the position of each row.
    - `groups`: the calls of attention.
    - `last` [slots]: the index of each slot's last row.
    """

    slots: Tensor
    positions: Tensor
    groups: tuple[Group, ...]
    last: Tensor


@dataclass(frozen=True)
class Slide:
    """One change of a context: the rows from `kept` on move to `target`.

    Then `ids` are fed into the rows from `start` to `target`. Without `ids`, `start` is `target`.
    """

    kept: int
    target: int
    start: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """A `Group` before its indices are uploaded: `rows` and `slots` are slices where possible."""

    rows: slice | list[int]
    slots: slice | list[int]
    slot_count: int
    rows_per_slot: int
    length: int
    is_masked: bool

    @property
    def indices(self) -> list[list[int]]:
        """The rows and the slots that are no slices, in this order."""
        return [numbers for numbers in (self.rows, self.slots) if isinstance(numbers, list)]


class KVCache:
    """Keys (rotated) and values of all layers, `[layers, slots, heads, capacity + 1, head_dim]`.

    A row's position is its index in the cache. The extra row after the capacity belongs to no
    context: passes of a fixed size write the keys and values of padding rows there.

    If `is_gathering`, slots that are not evenly spaced attend in one call too, over a copy of their
    rows. Otherwise each sequence of evenly spaced slots attends in a call of its own, without a
    copy. On CUDA slots are gathered, because launching a call costs more than the copy.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        queries_per_head: int,
        capacity: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (layers, slots, heads, capacity + 1, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.slot_count = slots
        self.capacity = capacity
        self.is_gathering = device.type == "cuda"
        self.layer_row_bytes = 2 * heads * head_dim * self.keys.element_size()
        self.queries_per_head = queries_per_head
        self._lengths = [0] * slots
        self._touched = [0] * slots

    @property
    def memory_bytes(self) -> int:
        """The size of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def length(self, slot: int) -> int:
        """Return the number of rows that the slot holds."""
        return self._lengths[slot]

    def extend(self, counts: Sequence[tuple[int, int]]) -> Rows:
        """Add `(slot, number of rows)` to the lengths, slots ascending, and plan the pass.

        If one of the slots has no room, raises `CacheFullError` and changes nothing.
        """
        starts = [self._lengths[slot] for slot, _ in counts]
        self.grow(counts)
        firsts = list(accumulate((count for _, count in counts), initial=0))
        slots = [slot for slot, count in counts for _ in range(count)]
        positions = chain.from_iterable(
            range(start, start + count) for start, (_, count) in zip(starts, counts, strict=True)
        )
        last = [stop - 1 for stop in firsts[1:]]
        plans = [self._plan(members, counts, firsts) for members in self._members(counts)]
        # All indices are uploaded in one transfer.
        lists = [slots, list(positions), last, *(index for plan in plans for index in plan.indices)]
        sent = upload(list(chain.from_iterable(lists)), self.keys.device, torch.long)
        at, where, ends, *others = sent.split_with_sizes([len(numbers) for numbers in lists])
        indices = iter(others)
        groups: list[Group] = []
        for plan in plans:
            rows = plan.rows if isinstance(plan.rows, slice) else next(indices)
            held = plan.slots if isinstance(plan.slots, slice) else next(indices)
            mask = self._mask(where[rows], plan) if plan.is_masked else None
            groups.append(Group(rows, held, plan.slot_count, plan.rows_per_slot, plan.length, mask))
        return Rows(at, where, tuple(groups), ends)

    def grow(self, counts: Sequence[tuple[int, int]]) -> None:
        """Add `(slot, number of rows)` to the lengths, slots ascending.

        If one of the slots has no room, raises `CacheFullError` and changes nothing.
        """
        if any(here[0] >= after[0] for here, after in pairwise(counts)):
            raise ValueError(f"slots are not ascending: {[slot for slot, _ in counts]}")
        for slot, count in counts:
            if self._lengths[slot] + count > self.capacity:
                raise CacheFullError(
                    f"slot {slot} holds {self._lengths[slot]} of {self.capacity} rows,"
                    f" {count} more do not fit"
                )
        for slot, count in counts:
            self._lengths[slot] += count
            self._touched[slot] = max(self._touched[slot], self._lengths[slot])

    def _members(self, counts: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return groups of indices of `counts`; the slots of a group attend in one call.

        If slots are gathered, the numbers of rows in a group differ by less than a factor of two,
        which limits the padding. Otherwise they are equal.
        """
        groups: dict[int, list[list[int]]] = {}
        for index, (slot, count) in enumerate(counts):
            if self.is_gathering:
                same = groups.setdefault((count - 1).bit_length(), [[]])
                longest = max(self._lengths[counts[other][0]] for other in (index, *same[-1]))
                size = (len(same[-1]) + 1) * longest * self.layer_row_bytes
                if size <= GATHERED_BYTES or not same[-1]:
                    same[-1].append(index)
                else:
                    same.append([index])
                continue
            same = groups.setdefault(0, [])
            if same and counts[same[-1][0]][1] == count:
                slots = [counts[other][0] for other in same[-1]]
                if _spacing([*slots, slot]):
                    same[-1].append(index)
                    continue
            same.append([index])
        return [group for same in groups.values() for group in same]

    def _plan(
        self, members: Sequence[int], counts: Sequence[tuple[int, int]], firsts: Sequence[int]
    ) -> _Plan:
        slots = [counts[index][0] for index in members]
        own = [counts[index][1] for index in members]
        lengths = [self._lengths[slot] for slot in slots]
        most = max(own)
        first = firsts[members[0]]
        rows: slice | list[int]
        if min(own) == most and firsts[members[-1]] - first == most * (len(members) - 1):
            rows = slice(first, first + most * len(members))
        else:
            rows = [
                firsts[index] + min(row, counts[index][1] - 1)
                for index in members
                for row in range(most)
            ]
        spacing = _spacing(slots)
        held = slice(slots[0], slots[-1] + 1, spacing) if spacing else slots
        is_masked = most > 1 or min(lengths) < max(lengths)
        return _Plan(rows, held, len(slots), most, max(lengths), is_masked)

    def _mask(self, positions: Tensor, plan: _Plan) -> Tensor:
        """Compute the mask of query rows at `positions` [slots * rows per slot]."""
        queries = positions.view(plan.slot_count, 1, plan.rows_per_slot)
        return causal_mask(
            queries.repeat(1, 1, self.queries_per_head), plan.length, self.keys.dtype
        )

    def write(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values `[rows, heads, head_dim]` of one layer."""
        self.keys[layer][rows.slots, :, rows.positions] = keys
        self.values[layer][rows.slots, :, rows.positions] = values

    def view(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        """Return the group's keys and values, each `[slots, heads, length, head_dim]`."""
        return (
            self.keys[layer, :, :, : group.length][group.slots],
            self.values[layer, :, :, : group.length][group.slots],
        )

    def move(
        self, slot: int, source: int, target: int, rotate: Callable[[Tensor, int, int], Tensor]
    ) -> None:
        """Move the rows from `source` on so that they begin at `target`, in place.

        `rotate(keys, source, target)` rotates keys `[layers, heads, rows, head_dim]` from the
        positions at `source` on to the positions at `target` on. Values do not depend on positions.
        If the rows do not fit, raises `CacheFullError` and changes nothing.
        """
        count = self._lengths[slot] - source
        if source < 0 or count < 0 or target < 0:
            raise ValueError(f"slot {slot}: no rows to move from {source} to {target}")
        if target + count > self.capacity:
            raise CacheFullError(f"slot {slot}: {count} rows do not fit behind {target}")
        starts = range(0, count, MOVED_ROWS)
        # The order of the parts makes sure that every row is moved before it is overwritten.
        for start in starts if target < source else reversed(starts):
            rows = min(MOVED_ROWS, count - start)
            old = slice(source + start, source + start + rows)
            new = slice(target + start, target + start + rows)
            self.keys[:, slot, :, new] = rotate(self.keys[:, slot, :, old], old.start, new.start)
            self.values[:, slot, :, new] = self.values[:, slot, :, old].clone()
        self._lengths[slot] = target + count
        self._touched[slot] = max(self._touched[slot], target + count)

    def restore(self, slot: int, length: int) -> None:
        """Undo a `truncate`: set the length back to `length`, which includes the dropped rows."""
        if not self._lengths[slot] <= length <= self._touched[slot]:
            raise ValueError(f"slot {slot} has no {length} rows to restore")
        self._lengths[slot] = length

    def truncate(self, slot: int, length: int) -> None:
        """Drop the rows from `length` on. The next rows overwrite them, or `reset` zeroes them."""
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"slot {slot} holds {self._lengths[slot]} rows, not {length}")
        self._lengths[slot] = length

    def rewind(self, slot: int, length: int) -> None:
        """Set the length back to its value before a failed pass. This drops the pass's rows."""
        if not 0 <= length <= self._touched[slot]:
            raise ValueError(f"slot {slot} never had {length} rows")
        self._lengths[slot] = length

    def reset(self, slot: int) -> None:
        """Drop the slot's rows and zero all rows written since the last reset."""
        touched = self._touched[slot]
        self.keys[:, slot, :, :touched].zero_()
        self.values[:, slot, :, :touched].zero_()
        self._lengths[slot] = self._touched[slot] = 0

    def is_clean(self, slot: int) -> bool:
        """True if the slot is empty and all of its memory is zero."""
        if self._lengths[slot] or self._touched[slot]:
            return False
        own = slice(0, self.capacity)
        dirty = self.keys[:, slot, :, own].any() | self.values[:, slot, :, own].any()
        return not bool(dirty.item())


def causal_mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Compute the mask [..., length] that is added to the scores of queries at `positions` [...].

    The mask is 0 for rows up to the query's own position, and -inf for later rows.
    """
    columns = torch.arange(length + -length % MASK_STRIDE, device=positions.device)
    mask = torch.zeros(*positions.shape, len(columns), device=positions.device, dtype=dtype)
    mask.masked_fill_(columns > positions.unsqueeze(-1), float("-inf"))
    return mask[..., :length]


def _spacing(slots: Sequence[int]) -> int | None:
    """Return the distance between neighbours in the ascending `slots`; None if distances differ."""
    distances = {following - slot for slot, following in pairwise(slots)}
    return None if len(distances) > 1 else next(iter(distances), 1)
