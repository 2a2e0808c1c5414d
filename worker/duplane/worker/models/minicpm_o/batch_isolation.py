"""Isolates failures in a batch: only the conversations that make a stage raise an error end.

A stage runs for several conversations in one call. If that call raises, the stage runs again for
each conversation alone, from the state before the call. Only the conversations that raise again
fail. So a stage must be repeatable until it has returned: this module restores the lengths of the
stage's cache, and the stage changes other state of a slot only at its end.

An error of the device itself passes through: after it no call succeeds in this process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from duplane.worker.models.types import UnitFailure

_log = logging.getLogger(__name__)

STAGE_FAILED = "STAGE_FAILED"


class BatchItem(Protocol):
    """One conversation's part of a batch. If a stage fails for it, `failure` is set."""

    slot: int
    failure: UnitFailure | None


class RowCounts(Protocol):
    """A cache that counts the rows of each slot."""

    def length(self, slot: int) -> int: ...
    def rewind(self, slot: int, length: int) -> None: ...


T = TypeVar("T", bound=BatchItem)
R = TypeVar("R")


def run_stage(
    stage: str,
    items: Sequence[T],
    call: Callable[[Sequence[T]], R],
    *,
    cache: RowCounts | None = None,
) -> list[tuple[Sequence[T], R]]:
    """Call a stage for all items that have not failed. If that raises, call it for each item alone.

    Returns, for each successful call, its items and its result. All other items have a `failure`.
    If the stage changes the lengths of a cache, pass that cache as `cache`: the lengths are
    restored before the second try.
    """
    items = [item for item in items if item.failure is None]
    if not items:
        return []
    lengths = [(item.slot, cache.length(item.slot)) for item in items] if cache else []
    try:
        return [(items, call(items))]
    except torch.AcceleratorError:
        raise
    except Exception:  # noqa: BLE001 - any fault of a stage is logged and becomes a UnitFailure
        _log.exception("%s failed for slots %s", stage, [item.slot for item in items])
    # Continue after the `except` block, where the memory that the failed call held is free again.
    if cache is not None:
        for slot, length in lengths:
            cache.rewind(slot, length)
    if len(items) == 1:
        items[0].failure = stage_failure(items[0].slot, stage)
        return []
    return [done for item in items for done in run_stage(stage, [item], call, cache=cache)]


def stage_failure(slot: int, stage: str) -> UnitFailure:
    """Return the failure for a stage that raised an error. This failure ends the conversation."""
    return UnitFailure(slot, STAGE_FAILED, f"the stage {stage!r} failed", is_fatal=True)
