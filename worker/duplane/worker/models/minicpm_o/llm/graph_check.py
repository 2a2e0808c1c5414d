"""Compares captured steps with the plain path on the same inputs, before they serve.

The first contact with an unknown device, driver or version of torch may cost speed, but no
conversation: a step whose results differ, or that cannot be captured, is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.transfer import download

FIRST_ROWS = 8
"""Number of rows of a context that are computed before a check. The others up to the last row are
zeros, which do not take time."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest error of a step, as a share of the largest value, by the dtype of the weights. Both paths
round differently, because they attend with different masks and batch sizes."""


def relative_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return the largest error of any pair of results and plain results, or infinity for NaN.

    An error is a share of the largest absolute value of the plain result.
    """
    errors = [
        (got.float() - plain.float()).abs().max() / plain.float().abs().max().clamp(min=1e-6)
        for got, plain in pairs
    ]
    largest = float(download(torch.stack(errors).max()))
    return largest if largest == largest else float("inf")
