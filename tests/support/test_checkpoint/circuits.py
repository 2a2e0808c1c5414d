"""Steers a decoder with random weights by a few constructed attention heads.

The first five channels of the residual stream are reserved; the others are free. Each embedding has
a constant in channel CONST, and either a unit vector in the free channels, which identifies the
kind of row, or a flag in channel START or MARK. The random layers add only small noise, and only to
the free channels. A constructed head of the first layer writes a positive or a negative value to
channel GATE. The output head reads CONST, GATE and the unit vectors, so the logits depend on the
kind of the current row and on the gate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from support.test_checkpoint.weights import Array, Tensors

from duplane.tools.checkpoint.weights import random_numbers

CONST, GATE, START, MARK, WORD = range(5)
FREE = 5
CONST_SIZE = 0.5
GATE_SIZE = 0.5
WORD_SIZE = 0.5


def unit_vectors(name: str, count: int, width: int, seed: int) -> Array:
    """Return rows of unit length in the free channels."""
    rows = random_numbers(name, seed).standard_normal((count, width)).astype(np.float32)
    rows[:, :FREE] = 0.0
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def orthogonal_vectors(name: str, width: int, seed: int) -> Array:
    """Return orthogonal rows of unit length, one for each free channel."""
    free = width - FREE
    square = random_numbers(name, seed).standard_normal((free, free))
    rows = np.zeros((free, width), np.float32)
    rows[:, FREE:] = np.linalg.qr(square)[0]
    return rows


def gate_output(width: int) -> Array:
    """Return the vector that the gate's head adds to a row."""
    output = np.zeros(width, np.float32)
    output[GATE] = GATE_SIZE
    return output


def normed(*parts: float, width: int) -> float:
    """Return the factor by which RMSNorm scales a row whose nonzero values are these."""
    return math.sqrt(width / sum(part**2 for part in parts))


def quieten(tensors: Tensors, prefix: str, noise: float) -> None:
    """Scale down the output of the layers under `prefix`; make it zero in the reserved channels."""
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            continue
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= noise
            tensor[:FREE] = 0.0
        elif name.endswith("norm.weight") and "self_attn" not in name:
            tensor[:FREE] = 1.0


@dataclass(frozen=True)
class Swing:
    """The output of one constructed head: `output` [width] times a wave between -1 and +1.

    The wave follows the cosine of (distance to the START row * frequency of rotary pair `pair` +
    `angle`). A larger `near` makes the wave more like a square wave.
    """

    pair: int
    angle: float
    near: float
    output: Array


@dataclass(frozen=True)
class FlagHeads:
    """Attention heads that attend to the START row and the MARK rows, and to no other rows.

    A MARK row has the score 0 and the value -1. The START row has the value +1, and its score
    depends on the distance to it. The scores of rows without a flag are far below both.
    """

    head_dim: int
    far: float
    start_size: float
    """The value in channel START of a START row after the layer's norm."""
    mark_size: float

    def write(self, tensors: Tensors, layer: str, swings: Sequence[Swing]) -> None:
        """Replace the first query heads of the layer, and the key heads that belong to them."""
        attention = f"{layer}self_attn."
        queries, keys = tensors[attention + "q_proj.weight"], tensors[attention + "k_proj.weight"]
        values, output = tensors[attention + "v_proj.weight"], tensors[attention + "o_proj.weight"]
        slow, sharing = self.head_dim // 2 - 1, len(queries) // len(keys)
        for number in range(-(-len(swings) // sharing)):
            rows = slice(number * self.head_dim, (number + 1) * self.head_dim)
            key, value = keys[rows], values[rows]
            key[:], value[:] = 0.0, 0.0
            # A flag is twice the constant of its row, so the next two terms cancel each other in
            # flagged rows.
            key[slow, CONST] = -2.0
            key[slow, [START, MARK]] = 2.0 * CONST_SIZE
            key[[swing.pair for swing in swings], START] = 1.0
            key[0, MARK] = 1.0
            value[0, START], value[0, MARK] = 1.0 / self.start_size, -1.0 / self.mark_size
        for number, swing in enumerate(swings):
            rows = slice(number * self.head_dim, (number + 1) * self.head_dim)
            query = queries[rows]
            query[:] = 0.0
            query[swing.pair, CONST] = swing.near * math.cos(swing.angle)
            query[swing.pair + self.head_dim // 2, CONST] = swing.near * math.sin(swing.angle)
            query[slow, CONST] = self.far
            output[:, rows] = 0.0
            output[:, rows.start] = swing.output
