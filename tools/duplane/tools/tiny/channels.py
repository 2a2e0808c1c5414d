"""How random decoder weights are given a will: reserved residual channels and one made head.

A decoder row is a constant in channel CONST, a unit vector that says what the row is in the free
channels, and perhaps a flag. Random layers write small noise into the free channels only. One
head of the first layer writes GATE, about +1 or -1; output rows read CONST, GATE and the unit
vectors, and so act on what the current row is and on the state of the gate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from duplane.tools.tiny.weights import Array, Tensors, generator

CONST, GATE, START, MARK = range(4)
FREE = 4
CONST_SIZE = 0.5
GATE_SIZE = 0.5


def unit_vectors(name: str, count: int, width: int, seed: int) -> Array:
    """Rows of unit length in the free channels."""
    rows = generator(name, seed).standard_normal((count, width)).astype(np.float32)
    rows[:, :FREE] = 0.0
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def orthogonal_vectors(name: str, width: int, seed: int) -> Array:
    """As many rows as there are free channels, of unit length and at right angles."""
    free = width - FREE
    square = generator(name, seed).standard_normal((free, free))
    rows = np.zeros((free, width), np.float32)
    rows[:, FREE:] = np.linalg.qr(square)[0]
    return rows


def normed(*parts: float, width: int) -> float:
    """What a root-mean-square norm multiplies a row of these parts with."""
    return math.sqrt(width / sum(part**2 for part in parts))


def quieten(tensors: Tensors, prefix: str, noise: float) -> None:
    """Let the layers under `prefix` add only small noise, and none to the reserved channels."""
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            continue
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= noise
            tensor[:FREE] = 0.0
        elif name.endswith("norm.weight") and "self_attn" not in name:
            tensor[:FREE] = 1.0


@dataclass(frozen=True)
class GateHead:
    """A head that weighs the one START row against the MARK rows, and sees nothing else.

    A MARK row scores 0, other rows about -`far`, and the START row `near` times the cosine of
    (distance * the frequency of rotary pair `pair` + `angle`). The first writes -1 to GATE, the
    last +1, so the gate swings with the distance to START.
    """

    head_dim: int
    pair: int
    angle: float
    near: float
    far: float
    start_value: float
    """What a START row shows in its channel after the layer's norm; MARK likewise."""
    mark_value: float

    def write(self, tensors: Tensors, layer: str) -> None:
        """Replace the first key head of the layer, and the query heads that share it."""
        attention = f"{layer}self_attn."
        queries, keys = tensors[attention + "q_proj.weight"], tensors[attention + "k_proj.weight"]
        values, output = tensors[attention + "v_proj.weight"], tensors[attention + "o_proj.weight"]
        sharing = queries.shape[0] // (keys.shape[0] // self.head_dim)
        for tensor in (queries[:sharing], keys[: self.head_dim], values[: self.head_dim]):
            tensor[:] = 0.0
        output[:, :sharing] = 0.0

        imaginary, slow = self.pair + self.head_dim // 2, self.head_dim // 2 - 1
        queries[self.pair, CONST] = self.near * math.cos(self.angle)
        queries[imaginary, CONST] = self.near * math.sin(self.angle)
        queries[slow, CONST] = self.far
        # A flag is twice the constant of its row, so the slowest pair cancels in flagged rows.
        keys[slow, CONST] = -2.0
        keys[slow, [START, MARK]] = 2.0 * CONST_SIZE
        keys[self.pair, START] = 1.0
        keys[0, MARK] = 1.0
        values[0, START] = 1.0 / self.start_value
        values[0, MARK] = -1.0 / self.mark_value
        output[GATE, 0] = GATE_SIZE
