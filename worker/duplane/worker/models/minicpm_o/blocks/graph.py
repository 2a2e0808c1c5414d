"""CUDA graphs: the kernels of a call, which the device repeats without the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from duplane.worker.models.minicpm_o.proof import Proofs


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


class Capturable(Protocol):
    """A computation over tensors with fixed addresses."""

    def launch(self) -> None:
        """Launch the computation, without a wait for the device."""
        ...


class Captures(Proofs):
    """Captures of one kind, which never run at the same time; those that prove themselves serve."""

    def __init__(self, kind: str, tolerance: float) -> None:
        super().__init__(f"CUDA graphs of {kind}")
        self._tolerance = tolerance
        self._pool: Any = None

    def capture(self, name: str, one: Capturable, check: Callable[[], float]) -> bool:
        """Let `launch` replay a graph; return whether it may, as its error by `check` is small."""
        return self.accepts(name, partial(self._try, one, check), self._tolerance)

    def _try(self, one: Capturable, check: Callable[[], float]) -> float:
        graph = Graph(one.launch, self._pool)
        self._pool = graph.pool
        one.launch = graph.replay
        return check()
