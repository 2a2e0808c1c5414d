"""The talker's steps of one unit: each feeds the token drawn last and draws the next.

All that a step reads and writes are tensors that stay where they are, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duplane.worker.model.sampling import draw
from duplane.worker.model.steps import Steps

if TYPE_CHECKING:  # it makes these of itself
    from duplane.worker.model.talker import Talker

TOKENS_PER_UNIT = 25
STEPS = TOKENS_PER_UNIT + 1
REPETITION_PENALTY = 1.05
REPETITION_WINDOW = 16
SETTINGS = 3
"""Numbers of a slot before its uniforms: temperature, fewest tokens, whether they are drawn."""


class SpeechSteps:
    """The speech of some slots, in contexts of at most `length` rows, token by token.

    `drawn` [slots, STEPS] are the tokens, those of the steps so far.
    """

    def __init__(
        self, talker: Talker, slots: Sequence[int], length: int, *, has_draws: bool = True
    ) -> None:
        """Without `has_draws` the most likely token is taken everywhere."""
        self._talker, self._has_draws = talker, has_draws
        self.places = Steps(talker.cache, slots, length)
        count, device = len(slots), talker.emb_text.weight.device
        self.drawn = torch.zeros(count, STEPS, dtype=torch.long, device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self._columns = torch.arange(STEPS, device=device)
        self._temperature = torch.ones(count, 1, device=device)
        self._shortest = torch.zeros(count, dtype=torch.long, device=device)
        self._is_drawn = torch.zeros(count, dtype=torch.bool, device=device)
        self._uniforms = torch.zeros(count, STEPS, dtype=torch.float64, device=device)

    def begin(self, positions: Sequence[int], numbers: Tensor) -> None:
        """Begin at these rows with `numbers` [slots, SETTINGS + STEPS], float64."""
        self.places.begin(positions)
        self.drawn.zero_()
        self._step.zero_()
        self._temperature.copy_(numbers[:, :1])
        self._shortest.copy_(numbers[:, 1])
        self._is_drawn.copy_(numbers[:, 2])
        self._uniforms.copy_(numbers[:, SETTINGS:])

    def run(self) -> None:
        """Do a step; nothing in it waits for the device or depends on values."""
        last = self.drawn.index_select(1, self._step - 1).squeeze(1)
        hidden = self._talker.model(self._talker.emb_code[0](last), self.places.rows())
        self.places.advance()
        self.choose(hidden)

    def choose(self, hidden: Tensor) -> None:
        """Draw the next token of each slot from hidden states [slots, width]."""
        talker = self._talker
        scores = talker.head_code[0](hidden).float() / self._temperature
        age = self._step - self._columns
        scores = penalise(scores, self.drawn, (age > 0) & (age <= REPETITION_WINDOW))
        scores[:, talker.end] += torch.where(self._step < self._shortest, float("-inf"), 0.0)
        token = scores.argmax(-1)
        if self._has_draws or talker.on_step is not None:
            probabilities = scores.softmax(-1)
            if talker.on_step is not None:
                talker.on_step(probabilities)
            uniforms = self._uniforms.index_select(1, self._step).squeeze(1)
            token = torch.where(self._is_drawn, draw(probabilities, uniforms), token)
        self.drawn.index_copy_(1, self._step, token[:, None])
        self._step.add_(1)


def penalise(scores: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """Push down ids `[rows, ids]` by how often each occurs among `tokens` `[rows, tokens]`.

    Positive scores are divided by the penalty, negative ones multiplied, once per occurrence;
    `counts` [tokens] says which of the tokens count.
    """
    # An id has one value wherever it occurs, so it does not matter which of them is written last.
    times = ((tokens[:, :, None] == tokens[:, None]) & counts).sum(-1)
    factors = REPETITION_PENALTY ** times.to(scores.dtype)
    chosen = scores.gather(1, tokens)
    return scores.scatter(1, tokens, torch.where(chosen < 0, chosen * factors, chosen / factors))
