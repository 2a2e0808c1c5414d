"""The sizes to which batches of convolutions are padded on a CUDA device.

On CUDA the first convolution of a new shape takes long, because cuDNN plans it. So these batches
have few sizes, and each size runs once when the model is loaded. The rows of a batch do not depend
on each other, so repeated rows serve as padding.
"""

from __future__ import annotations


def padded_size(count: int) -> int:
    """Return the size of the smallest padded batch that has room for `count` rows."""
    return 1 << (count - 1).bit_length()


def padded_sizes(most: int) -> list[int]:
    """Return the sizes of all padded batches of up to `most` rows."""
    return [1 << power for power in range((most - 1).bit_length() + 1)]
