"""Launches of blocks: groups of slots, and a watch on the fake device for tensors and addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from duplane.worker.models.minicpm_o.blocks import graph

from .fake_cuda import Elsewhere


@st.composite
def groupings(draw: st.DrawFn, counts: Sequence[int]) -> list[list[int]]:
    """Draw groups of slots, in any order, until each slot was in as many groups as it counts."""
    left = list(counts)
    steps: list[list[int]] = []
    while going := [slot for slot, count in enumerate(left) if count]:
        order = draw(st.permutations(going))
        steps.append(list(order[: draw(st.integers(1, len(going)))]))
        for slot in steps[-1]:
            left[slot] -= 1
    return steps


class LaunchWatch(TorchDispatchMode):
    """Watches the graphs that are captured from now on.

    Within `with`, `made` gets the names of operations that make a tensor on the fake device outside
    of a replay; views do not count.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, state: Callable[[], Iterable[Tensor]] = tuple
    ) -> None:
        """Watch the inputs of each graph, and the tensors that `state` returns."""
        super().__init__()
        self.made: list[str] = []
        self.replays = 0
        self._is_replaying = False
        self._state = state
        self._addresses: list[tuple[list[int], Callable[[], list[int]]]] = []
        self._capture: Any = graph.Graph
        patch.setattr(graph, "Graph", self._watched)

    @property
    def captures(self) -> int:
        """The number of captured graphs."""
        return len(self._addresses)

    @property
    def has_fixed_addresses(self) -> bool:
        """Whether all tensors are where they were when the graphs were captured."""
        return all(now() == at_capture for at_capture, now in self._addresses)

    def _watched(self, call: Callable[[], None], pool: Any = None) -> Any:
        staged: Any = call.__self__  # type: ignore[attr-defined]  a method

        def now() -> list[int]:
            return [_address(one) for one in (staged.numbers, *staged.tensors, *self._state())]

        def replay() -> None:
            self.replays += 1
            self._is_replaying = True
            captured.replay()
            self._is_replaying = False

        self._addresses.append((now(), now))
        captured = self._capture(call, pool)
        return SimpleNamespace(pool=None, replay=replay)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = not (func.is_view or func._schema.is_mutable) and isinstance(result, Elsewhere)
        if is_new and not self._is_replaying:
            self.made.append(func._schema.name)
        return result


def _address(tensor: Tensor) -> int:
    assert isinstance(tensor, Elsewhere)
    return tensor._inside.data_ptr()
