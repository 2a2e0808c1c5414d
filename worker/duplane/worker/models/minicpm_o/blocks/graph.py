"""A CUDA graph: the kernels of one call, which the device repeats without the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Graph:
    """A call on a CUDA device, captured once and replayed."""

    def __init__(self, call: Callable[[], None], pool: Any = None) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries must allocate their workspaces before the capture
            call()
            call()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            call()

    @property
    def pool(self) -> Any:
        """The memory of intermediate results. Graphs that never run concurrently may share it."""
        return self._graph.pool()

    def replay(self) -> None:
        """Run the captured call on the current values of its tensors."""
        self._graph.replay()
