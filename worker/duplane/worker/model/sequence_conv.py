"""Causal convolution over sequences that keep their channels last, and the tails it streams with.

Knows nothing about slots: a tail is a tensor that the caller keeps between two chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class SequenceConv1d(nn.Conv1d):
    """An unpadded `Conv1d` along dimension 1 of `[batch, time, ..., channels]`.

    The parameters are those of `nn.Conv1d`. As one matrix product it needs no transposes, and
    its result does not depend on which convolution algorithm a device would pick for the batch.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map `[batch, time, ..., in]` to `[batch, time - kernel + 1, ..., out]`."""
        windows = input.unfold(1, self.kernel_size[0], 1).flatten(-2)
        return functional.linear(windows, self.weight.flatten(1), self.bias)


def tail(sequence: Tensor, length: int, ends: Tensor | None) -> Tensor:
    """Take the last `length` entries along dimension 1 that are not padding.

    `sequence` is `[batch, length + time, ...]`: a tail and the chunk behind it. `ends[b]` says how
    many entries of the chunk count in row `b`; None means that all do.
    """
    if ends is None:
        return sequence[:, sequence.shape[1] - length :]
    columns = ends[:, None] + torch.arange(length, device=sequence.device)
    rows = torch.arange(len(sequence), device=sequence.device)[:, None]
    return sequence[rows, columns]
