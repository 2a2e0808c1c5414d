"""CUDA graphs of one-row steps: captured at warm-up, replayed where eager launches would cost more.

A step is captured for the first so many slots and for a bound on their contexts. Slots that do not
take part compute what nobody sees: their row goes to one behind the cache's capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from duplane.worker.model.cache import KVCache

SHORTEST = 512
"""The least bound on contexts; further ones are its doubles."""
WASTE = 0.5
"""What a replay may read in vain, as a share of the weights that any pass reads."""


class StaticStep(Protocol):
    """A step over tensors that stay where they are."""

    def run(self) -> None: ...


S = TypeVar("S", bound=StaticStep)


class Graph:
    """A call on a CUDA device, captured once and replayed."""

    def __init__(self, call: Callable[[], None], pool: Any = None) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up outside of a capture
            call()
            call()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            call()

    @property
    def pool(self) -> Any:
        """The memory of its intermediate results; graphs that do not overlap may share it."""
        return self._graph.pool()

    def replay(self) -> None:
        """Do the call again, on what its tensors hold now."""
        self._graph.replay()


class StepGraphs(Generic[S]):
    """The captured steps of one decoder, by how many slots and how long contexts they serve."""

    def __init__(self, cache: KVCache, weight_bytes: int) -> None:
        self._cache, self._weight_bytes = cache, weight_bytes
        self._row_bytes = cache.memory_bytes // (cache.slot_count * (cache.capacity + 1))
        self._steps: dict[tuple[int, int], tuple[S, Callable[[], None]]] = {}

    def capture(self, make: Callable[[int, int], S], *, is_replayed: bool = True) -> None:
        """Make and capture a step for every size; without `is_replayed` it is called instead."""
        pool: Any = None
        for size in self._sizes():
            step = make(*size)
            if is_replayed:
                graph = Graph(step.run, pool)
                pool = graph.pool
                self._steps[size] = (step, graph.replay)
            else:
                self._steps[size] = (step, step.run)

    def find(self, slots: Sequence[int], length: int) -> tuple[S, Callable[[], None]] | None:
        """The smallest step for slots, ascending, whose contexts stay within `length` rows.

        None where it would read too much that nobody needs.
        """
        fitting = [size for size in self._steps if size[0] > slots[-1] and size[1] >= length]
        if not fitting:
            return None
        width, bound = min(fitting)
        needed = sum(self._cache.length(slot) for slot in slots)
        is_wasteful = (width * bound - needed) * self._row_bytes > WASTE * self._weight_bytes
        return None if is_wasteful else self._steps[width, bound]

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Largest first: the smaller ones fit into the memory that it took."""
        for width in sorted(_doubles(1, self._cache.slot_count), reverse=True):
            for length in sorted(_doubles(SHORTEST, self._cache.capacity), reverse=True):
                yield width, length


def _doubles(first: int, last: int) -> set[int]:
    """`first` and its doubles below `last`, and `last`."""
    found = {last}
    while first < last:
        found.add(first)
        first *= 2
    return found
