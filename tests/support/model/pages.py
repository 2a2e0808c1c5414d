"""Pages of slots that are mixed, as after many conversations in a pool that is almost full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from duplane.tools.bench.launches import caches
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.model import DuplexModel


class _Mixed(set[int]):
    """Free pages of which each slot gets the first one instead of its own."""

    def __contains__(self, page: object) -> bool:
        return False


def mix_pages(cache: KVCache) -> None:
    """Let the slots of the cache get pages in the order in which they ask."""
    cache.pages.free = _Mixed(cache.pages.free)


@contextmanager
def mixed_pages(model: DuplexModel, *, are_mixed: bool = True) -> Iterator[None]:
    """Mix the pages of the model's contexts, all of which begin and end within this block."""
    before = [cache.pages.free for cache in caches(model)]
    for cache in caches(model) if are_mixed else ():
        mix_pages(cache)
    yield
    for cache, free in zip(caches(model), before, strict=True):
        assert {*free} == {*cache.pages.free} == {*range(cache.pages.scratch)}
        cache.pages.free = free
