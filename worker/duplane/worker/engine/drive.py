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
    waiting = {item.slot: item for item in items}
    has_seen, limits = False, limits or Limits()
    while waiting:
        works = [Work(item, Kind.UNIT, 0.0, size=item.rows) for item in waiting.values()]
        launch = next_single(works, limits, 0.0, is_shared=False, has_seen=has_seen)
        assert launch is not None
        has_seen = launch.block is Block.SEE
        for item in launch.items:
            del waiting[item.slot]
        for result in model.advance(launch.items):
            if isinstance(result, Unfinished):
                waiting[result.slot] = Continue(result.slot, result.part, result.rows)
            yield result
