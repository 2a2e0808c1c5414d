"""Blocks: parts of the model that run as one CUDA graph, over inputs with fixed addresses.

A launch of a block has three steps. `stage` sends all whole numbers of the launch in one upload,
`Staged.run` computes with operations of torch only, and `transfer.Download` sends the result back.
`run` neither waits nor decides by values, so it can be captured once for each form of its inputs,
and replayed. Forms without a graph, and all forms on a CPU, call the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplane.worker.models.minicpm_o.blocks import graph
from duplane.worker.models.minicpm_o.proof import TOLERANCES, Proofs, relative_error
from duplane.worker.models.minicpm_o.transfer import refill, upload

Numbers = NDArray[np.int64]
F = TypeVar("F", bound=Hashable)


class Staged:
    """The inputs of one form of a block: `numbers`, int64, and `tensors`, which the caller fills.

    `compute` maps both to the result. If the form has a graph, all these tensors exist once, and
    each launch overwrites those of the launch before, in the order of the CUDA stream.
    """

    def __init__(
        self, numbers: Tensor, tensors: Sequence[Tensor], compute: Callable[..., Tensor]
    ) -> None:
        self.numbers, self.tensors = numbers, tensors
        self._compute = compute
        self._replay: Callable[[], None] | None = None
        self.result: Tensor | None = None

    def capture(self, pool: object) -> object:
        """Capture the computation, so that `run` replays it. Returns the pool of its memory."""
        captured = graph.Graph(self._call, pool)
        self._replay = captured.replay
        return captured.pool

    def run(self) -> Tensor:
        """Compute the result for the present inputs."""
        (self._replay or self._call)()
        assert self.result is not None
        return self.result

    def _call(self) -> None:
        self.result = self._compute(self.numbers, *self.tensors)


class Block(Generic[F]):
    """A computation over inputs of few forms."""

    def __init__(
        self,
        compute: Callable[..., Tensor],
        device: torch.device,
        make_tensors: Callable[[F], Sequence[Tensor]] | None = None,
    ) -> None:
        """Compute `compute(form, numbers, *make_tensors(form))`; the caller fills the tensors."""
        self._compute, self._device, self._make_tensors = compute, device, make_tensors
        self._captured: dict[F, Staged] = {}

    def stage(self, form: F, numbers: Numbers) -> Staged:
        """Send the numbers to the device; return the inputs of a launch."""
        staged = self._captured.get(form)
        if staged is None:
            return self._new(form, numbers)
        refill(staged.numbers, numbers)
        return staged

    def capture(
        self,
        name: str,
        trials: Iterable[tuple[F, Sequence[Numbers]]],
        clear: Callable[[], None],
        fill: Callable[[Staged], None] | None = None,
    ) -> None:
        """Capture the form of each trial; use the graphs that agree with plain calls.

        A trial has the numbers of launches, one after the other; `fill` fills the tensors of each.
        `clear` puts the state that the launches change back to what it was before the trial.
        """
        pool: object = None
        proofs = Proofs(f"CUDA graphs of {name}")
        for form, launches in trials:
            staged = self._new(form, launches[0], fill)

            def capture_and_check(
                form: F = form, launches: Sequence[Numbers] = launches, staged: Staged = staged
            ) -> float:
                nonlocal pool
                plain = [self._new(form, numbers, fill).run() for numbers in launches]
                clear()
                pool = staged.capture(pool)
                clear()
                replayed: list[Tensor] = []
                for numbers in launches:
                    refill(staged.numbers, numbers)
                    replayed.append(staged.run().clone())
                return relative_error(list(zip(replayed, plain, strict=True)))

            if proofs.accepts(str(form), capture_and_check, TOLERANCES[torch.float32]):
                self._captured[form] = staged
            clear()
        proofs.report()

    def _new(
        self, form: F, numbers: Numbers, fill: Callable[[Staged], None] | None = None
    ) -> Staged:
        def compute(*inputs: Tensor) -> Tensor:
            return self._compute(form, *inputs)

        tensors = () if self._make_tensors is None else self._make_tensors(form)
        staged = Staged(upload(numbers, self._device), tensors, compute)
        if fill is not None:
            fill(staged)
        return staged
