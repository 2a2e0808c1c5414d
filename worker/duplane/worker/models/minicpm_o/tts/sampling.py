"""Sampling of speech tokens: the request of one slot, and the filters of its scores.

Source: `MiniCPMO45/utils.py` and `MiniCPMO45/modeling_minicpmo_unified.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm.sampling import Uniforms

TOKENS_PER_UNIT = 25
UNIT_DRAWS = TOKENS_PER_UNIT + 1
"""Tokens drawn for one unit. The last token, which may be the end of speech, is not returned."""
REPETITION_PENALTY = 1.05
REPETITION_WINDOW = 16
TOP_P = 0.85
TOP_K = 25
MIN_CANDIDATES = 3
SETTINGS = 5
"""Number of the settings of a slot's draws."""


@dataclass(frozen=True)
class SpeechRequest:
    """The input of one slot: `condition` rows [rows, width], and the settings of the draws.

    - `is_greedy`: the most likely token is chosen, as at temperature 0.
    - `fewest`, `most`: speech may end after `fewest` tokens; at most `most` tokens are drawn.
    - `history`: earlier tokens that the repetition penalty counts.
    - `filtered_from`: the step from which on tokens are drawn only from the top-p and top-k
      candidates; None if this is never so.
    """

    slot: int
    condition: Tensor
    uniforms: Uniforms
    is_greedy: bool
    temperature: float
    is_turn_end: bool = False
    fewest: int = 0
    most: int = UNIT_DRAWS
    history: Sequence[int] = ()
    filtered_from: int | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether tokens are drawn at random."""
        return not self.is_greedy and self.temperature > 0

    def numbers(self, steps: int) -> list[float]:
        """Return the settings, `history` and the random numbers of this slot as one list.

        `DrawState.begin` expects this order.
        """
        missing = REPETITION_WINDOW - len(self.history)
        return [
            self.temperature or 1.0,
            self.fewest,
            self.most,
            self.is_drawn,
            steps if self.filtered_from is None else self.filtered_from,
            *([-1] * missing),
            *self.history,
            *(self.uniforms.peek(steps) if self.is_drawn else [0.0] * steps),
        ]


def penalise(scores: Tensor, tokens: Tensor, is_counted: Tensor) -> Tensor:
    """Lower the `scores` [rows, ids] of ids once for each of their occurrences in `tokens`.

    For each occurrence, a positive score is divided by the penalty; a negative score is multiplied
    by it. `tokens` are [rows, n]; `is_counted` [n] or [rows, n] is False for tokens to ignore.
    """
    # All occurrences of an id write the same value, so their order does not matter.
    same = tokens[:, :, None] == tokens[:, None]
    counts = (same & is_counted.unsqueeze(-2)).sum(-1)
    factors = REPETITION_PENALTY ** counts.to(scores.dtype)
    chosen = scores.gather(1, tokens)
    return scores.scatter(1, tokens, torch.where(chosen < 0, chosen * factors, chosen / factors))


def filter_top(scores: Tensor) -> Tensor:
    """Set scores [rows, ids] outside the top-p and top-k candidates to minus infinity.

    At least `MIN_CANDIDATES` ids of each row stay.
    """
    ranked = scores.topk(min(TOP_K, scores.shape[-1]), dim=-1).values
    mass = (ranked - scores.logsumexp(-1, keepdim=True)).exp()
    before = mass.cumsum(-1) - mass
    is_first = torch.arange(ranked.shape[-1], device=scores.device) < MIN_CANDIDATES
    kept = ((before < TOP_P) | is_first).sum(-1, keepdim=True)
    floor = ranked.gather(-1, kept - 1)
    return scores.masked_fill(scores < floor, float("-inf"))
