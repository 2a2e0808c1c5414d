"""Sampling of speech tokens: the requests of slots, their draws, and the filters of their scores.

Source: `MiniCPMO45/utils.py` and `MiniCPMO45/modeling_minicpmo_unified.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm.sampling import Uniforms, draw
from duplane.worker.models.minicpm_o.transfer import upload

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
        """Return the settings, `history` and the random numbers of this slot, for `DrawState`."""
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


@dataclass(frozen=True)
class DrawState:
    """The draws of some slots, in tensors with fixed addresses.

    `numbers`, float64 [slots, n], are those of `SpeechRequest.numbers`. `drawn` [slots, window +
    steps] holds the last tokens before the first step (-1 for none), then the drawn tokens. `step`
    [1] is the number of steps so far. Without `has_draws` or `has_filter` the kernels for draws or
    filters are left out.
    """

    numbers: Tensor
    temperature: Tensor
    is_drawn: Tensor
    drawn: Tensor
    step: Tensor
    window: Tensor
    has_draws: bool = True
    has_filter: bool = True

    @classmethod
    def allocate(cls, numbers: Tensor) -> DrawState:
        """Allocate the state of slots whose `numbers` come before `begin`."""
        (count, width), device = numbers.shape, numbers.device
        return cls(
            numbers,
            temperature=torch.ones(count, 1, device=device),
            is_drawn=torch.zeros(count, dtype=torch.bool, device=device),
            drawn=torch.full((count, width - SETTINGS), -1, device=device),
            # A CUDA graph captures a step before `begin`, and this is never the first step.
            step=torch.ones(1, dtype=torch.long, device=device),
            window=torch.arange(REPETITION_WINDOW, device=device),
        )

    @classmethod
    def of(cls, requests: Sequence[SpeechRequest], steps: int, device: torch.device) -> DrawState:
        """Return the state of the slots of these requests before their first draw."""
        numbers = [request.numbers(steps) for request in requests]
        state = replace(
            cls.allocate(upload(numbers, device, torch.float64)),
            has_draws=any(request.is_drawn for request in requests),
            has_filter=any(request.filtered_from is not None for request in requests),
        )
        state.begin()
        return state

    def first(self, count: int) -> DrawState:
        """Return the state of the first `count` slots, in the same memory."""
        of_slots = ("numbers", "temperature", "is_drawn", "drawn")
        return replace(self, **{name: vars(self)[name][:count] for name in of_slots})

    def begin(self) -> None:
        """Start with the present `numbers`."""
        self.temperature.copy_(self.numbers[:, :1])
        self.is_drawn.copy_(self.numbers[:, 3])
        self.drawn.fill_(-1)
        self.drawn[:, :REPETITION_WINDOW] = self.numbers[:, SETTINGS:][:, :REPETITION_WINDOW]
        self.step.zero_()

    @property
    def tokens(self) -> Tensor:
        """The drawn tokens [slots, steps]; -1 for those that are not drawn yet."""
        return self.drawn[:, REPETITION_WINDOW:]

    @property
    def last(self) -> Tensor:
        """The last token [slots] of each slot, at the earliest after the first draw."""
        return self.drawn.index_select(1, self.step + (REPETITION_WINDOW - 1)).squeeze(1)

    def choose(
        self, scores: Tensor, end: int, on_step: Callable[[Tensor], None] | None = None
    ) -> None:
        """Draw the next tokens from float32 scores [slots, ids]; `end` is the end of speech.

        `on_step` gets the probabilities. This never waits for the device.
        """
        fewest, filtered_from = self.numbers[:, 1], self.numbers[:, 4:SETTINGS]
        recent = self.drawn.index_select(1, self.step + self.window)
        scores = penalise(scores / self.temperature, recent.clamp(min=0), recent >= 0)
        if self.has_filter:
            scores = torch.where(self.step >= filtered_from, filter_top(scores), scores)
        scores[:, end] += torch.where(self.step < fewest, float("-inf"), 0.0)
        token = scores.argmax(-1)
        if self.has_draws or on_step is not None:
            probabilities = scores.softmax(-1)
            if on_step is not None:
                on_step(probabilities)
            uniforms = self.numbers[:, SETTINGS + REPETITION_WINDOW :]
            drawn = draw(probabilities, uniforms.index_select(1, self.step).squeeze(1))
            token = torch.where(self.is_drawn, drawn, token)
        self.drawn.index_copy_(1, self.step + REPETITION_WINDOW, token[:, None])
        self.step.add_(1)

    def have_ended(self, end: int) -> Tensor:
        """Return bool [slots]: whether the slot has drawn the end of speech, or all its tokens."""
        return (self.drawn == end).any(-1) | (self.step >= self.numbers[:, 2])


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
