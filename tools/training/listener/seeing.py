"""A part of training only: the LLM must name what is seen, in each unit and in each answer.

The loss of answers alone is a sparse signal: a picture is asked about in few units, and the LLM has
to learn the question, where the picture is, and its embeddings at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.llm.decoder import Decoder
from training.dimensions import PICTURE_ROWS
from training.listener.sequences import IGNORED, Batch, TokenRow
from training.vision.scenes import NOTHING, Scene
from training.vision.tower import HEADS, labels


class SeenLayer(nn.Module):
    """An output layer that reads the states in the middle of a decoder, as the last pass left them.

    So the upper layers can use what the lower ones have read of the picture.
    """

    def __init__(self, decoder: Decoder, width: int, scenes: Sequence[Scene]) -> None:
        """`scenes` are what the pictures show, by their numbers."""
        super().__init__()
        self.output = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sum(HEADS.values())))
        self._targets = torch.tensor([labels(one) for one in (Scene(NOTHING), *scenes)])
        self._states = torch.zeros(0)
        decoder.layers[(len(decoder.layers) - 1) // 2].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, states: Tensor) -> None:
        del module, inputs
        self._states = states

    def loss(self, batch: Batch, rows: Sequence[TokenRow]) -> Tensor:
        """Return the loss of kind, colour, count and digit of the latest picture.

        The rows of the last pass that count are those with audio, and those of chosen ids.
        """
        is_judged = batch.audio | (batch.targets != IGNORED)
        shown = batch.picture.cumsum(1) // PICTURE_ROWS
        most = max(len(row.pictures) for row in rows)
        numbers = torch.tensor(
            [
                [0, *(one + 1 for one in row.pictures), *[0] * (most - len(row.pictures))]
                for row in rows
            ]
        )
        targets = self._targets[numbers.gather(1, shown)[is_judged]]
        states = self._states.view(*is_judged.shape, -1)[is_judged].float()
        parts = torch.split_with_sizes(self.output(states), [*HEADS.values()], 1)
        losses = [
            functional.cross_entropy(part, targets[:, n], ignore_index=IGNORED, reduction="sum")
            for n, part in enumerate(parts)
        ]
        return torch.stack(losses).sum() / max(1, len(targets))
