"""Blocks: parts of the model that run as one CUDA graph, over inputs with fixed addresses.

A launch of a block has three steps. `stage` sends all whole numbers of the launch in one upload,
`Staged.run` computes with operations of torch only, and `transfer.Download` sends the result back.
`run` neither waits nor decides by values, so it can be captured once for each form of its inputs,
and replayed. Forms without a graph, and all forms on a CPU, call the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplane.worker.models.minicpm_o.blocks.graph import Captures
from duplane.worker.models.minicpm_o.proof import TOLERANCES, relative_error
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
        self.result: Tensor | None = None

    def run(self) -> Tensor:
        """Compute the result for the present inputs."""
        self.launch()
        assert self.result is not None
        return self.result

    def launch(self) -> None:
        """Compute the result without a wait."""
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
        captures = Captures(name, TOLERANCES[torch.float32])
        for form, launches in trials:
            staged = self._new(form, launches[0], fill)
            plain = [self._new(form, numbers, fill) for numbers in launches]
            check = partial(_error, staged, plain, clear)
            if captures.capture(str(form), staged, check):
                self._captured[form] = staged
            clear()
        captures.report()

    def _new(
        self, form: F, numbers: Numbers, fill: Callable[[Staged], None] | None = None
    ) -> Staged:
        tensors = () if self._make_tensors is None else self._make_tensors(form)
        staged = Staged(upload(numbers, self._device), tensors, partial(self._compute, form))
        if fill is not None:
            fill(staged)
        return staged


def _error(staged: Staged, plain: Sequence[Staged], clear: Callable[[], None]) -> float:
    """Compare a captured form with plain calls, each on the numbers of the same launches."""
    clear()
    replayed: list[Tensor] = []
    for each in plain:
        staged.numbers.copy_(each.numbers)
        replayed.append(staged.run().clone())
    clear()
    return relative_error([(got, each.run()) for got, each in zip(replayed, plain, strict=True)])
