"""The sizes to which batches and their rows are padded on a CUDA device.

On CUDA the first call with a new shape takes long; for example, cuDNN plans each convolution. So
batches have few sizes and few lengths, and all of these run once when the model is loaded. The rows
of a batch do not depend on each other, so repeated rows serve as padding.
"""

from __future__ import annotations

from collections.abc import Sequence


def padded_length(length: int, buckets: Sequence[int]) -> int:
    """Return the first of the ascending `buckets` that has room for `length`, else `length`."""
    return next((bucket for bucket in buckets if bucket >= length), length)


def padded_size(count: int) -> int:
    """Return the size of the smallest padded batch that has room for `count` rows."""
    return 1 << (count - 1).bit_length()


def padded_sizes(most: int) -> list[int]:
    """Return the sizes of all padded batches of up to `most` rows."""
    return [1 << power for power in range((most - 1).bit_length() + 1)]
