"""Runs items on a model until nothing of them is left, without threads and channels.

With this, the worker warms up a model, and tools measure one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duplane.worker.engine.schedule import Block, Kind, Limits, Work, next_single
from duplane.worker.models.interface import Continue, Item, Model, Result, Unfinished


def drive(model: Model, items: Sequence[Item], limits: Limits | None = None) -> Iterator[Result]:
    """Yield all results of items of different slots, in launches of the usual order and size.

    The caller iterates to the end. A slot that fails has no further launch.
    """
    waiting = {item.slot: _work(item) for item in items}
    has_seen = False
    while launch := next_single(
        tuple(waiting.values()), limits or Limits(), 0.0, is_shared=False, has_seen=has_seen
    ):
        has_seen = launch.block is Block.SEE
        for item in launch.items:
            del waiting[item.slot]
        for result in model.advance(launch.items):
            if isinstance(result, Unfinished):
                item = Continue(result.slot, result.part, result.rows)
                waiting[result.slot] = _work(item)
            yield result


def _work(item: Item) -> Work:
    return Work(item, Kind.UNIT, 0.0, size=item.rows)
