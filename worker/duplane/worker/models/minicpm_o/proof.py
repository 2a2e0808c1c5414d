"""Compares graphs and kernels with the plain path on the same inputs, before they serve.

The first contact with an unknown device, driver or version of torch may cost speed, but no
conversation: what raises, or has other results than the plain path, is not used. One line of the
log says which and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duplane.worker.models.interface import DeviceLostError
from duplane.worker.models.minicpm_o.transfer import download

FIRST_ROWS = 8
"""Number of rows of a context that are computed before a check. The others up to the last row are
zeros, which do not take time."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest error of a graph, as a share of the largest value, by the dtype of the weights. Both
paths round differently, because they attend with different masks and batch sizes."""
KERNEL_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest error of a kernel, as a share of the largest value, by dtype."""

_log = logging.getLogger(__name__)


def relative_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the largest error of any pair of results and plain results, or infinity for NaN.

    An error is a share of the largest absolute value of the plain result.
    """
    errors = [
        (got.float() - plain.float()).abs().max() / plain.float().abs().max().clamp(min=1e-6)
        for got, plain in pairs
    ]
    largest = float(download(torch.stack(errors).max()))
    return largest if largest == largest else float("inf")


@dataclass(frozen=True)
class ProofReport:
    """The checks of one kind of fast path: `errors` of those that serve, `faults` of the others.

    Both have the names of the fast paths as keys. An error is that of `relative_error`.
    """

    kind: str
    errors: Mapping[str, float]
    faults: Mapping[str, str]


reports: list[ProofReport] = []
"""All reports of this process, in their order."""


class Proofs:
    """The checks of some fast paths of one kind, such as the CUDA graphs of the LLM."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._errors: dict[str, float] = {}
        self._faults: dict[str, str] = {}

    def accepts(self, name: str, check: Callable[[], float], tolerance: float) -> bool:
        """Return whether a fast path may serve: `check` returns an error within the tolerance.

        Whatever `check` raises refuses the fast path. The device raises its own error for what it
        does not support, too, for example in a capture, and can still be used then. Raises
        torch.AcceleratorError or DeviceLostError if it cannot be used any more.
        """
        try:
            error = check()
            if error <= tolerance:
                self._errors[name] = error
                return True
            fault = f"differs by {error:.2g}, {tolerance:g} is allowed"
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the border to drivers and compilers
            if isinstance(error, torch.AcceleratorError):
                torch.cuda.synchronize()  # raises again if the device is lost
            fault = (str(error) or type(error).__name__).splitlines()[0]
        self._faults[name] = fault
        return False

    def report(self) -> None:
        """Add the report to `reports`, and log what is switched off, if anything is."""
        reports.append(ProofReport(self._kind, self._errors, self._faults))
        if self._faults:
            _log.warning(
                "%d of %d %s are switched off, which costs speed: %s",
                len(self._faults),
                len(self._faults) + len(self._errors),
                self._kind,
                "; ".join(f"{name}: {fault}" for name, fault in self._faults.items()),
            )
