"""A CUDA graph: the kernels of one call, which the device repeats without the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Graph:
    """A call on a CUDA device, captured once and replayed."""

    def __init__(self, call: Callable[[], None], pool: Any = None) -> None:
        self._memory, self._stream = pool or (None, torch.cuda.Stream())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # libraries allocate their workspaces before it
            call()
            call()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=self._memory, stream=self._stream):
            call()

    @property
    def pool(self) -> Any:
        """What graphs share that never run at the same time: memory and a stream to capture on.

        Libraries have a workspace for each stream. Graphs that were captured on one stream share
        it, also if they are replayed on two.
        """
        return self._graph.pool(), self._stream

    def replay(self) -> None:
        """Run the captured call on the current values of its tensors."""
        self._graph.replay()
