"""Steps of the talker: a step feeds the last token of each slot and draws the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm.attention import Rows
from duplane.worker.models.minicpm_o.llm.decoder import Decoder
from duplane.worker.models.minicpm_o.llm.sampling import draw
from duplane.worker.models.minicpm_o.tts.sampling import (
    REPETITION_WINDOW,
    SETTINGS,
    UNIT_DRAWS,
    filter_top,
    penalise,
)


class SpeechNetwork(Protocol):
    """What steps need of a talker. `end` is the token that ends speech.

    `on_step` gets the probabilities of every step, for comparison with traces.
    """

    model: Decoder
    end: int
    on_step: Callable[[Tensor], None] | None

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [slots, width] of tokens [slots]."""
        ...

    def score(self, hidden: Tensor) -> Tensor:
        """Map hidden states [slots, width] to float32 scores [slots, tokens]."""
        ...


@dataclass(frozen=True)
class DrawState:
    """The draws of some slots and their settings, in tensors with fixed addresses.

    `drawn` [slots, window + steps] holds the last tokens before the first step (-1 for none), then
    the drawn tokens. `step` [1] is the number of steps so far.
    """

    drawn: Tensor
    step: Tensor
    temperature: Tensor
    fewest: Tensor
    most: Tensor
    is_drawn: Tensor
    filtered_from: Tensor
    uniforms: Tensor

    @classmethod
    def allocate(cls, count: int, device: torch.device, steps: int = UNIT_DRAWS) -> DrawState:
        """Allocate the state of `count` slots.

        The number of steps is 1 until `begin`, because a CUDA graph captures a step before that,
        and `TalkerSteps.run` is never the first step.
        """
        return cls(
            drawn=torch.full((count, REPETITION_WINDOW + steps), -1, device=device),
            step=torch.ones(1, dtype=torch.long, device=device),
            temperature=torch.ones(count, 1, device=device),
            fewest=torch.zeros(count, dtype=torch.long, device=device),
            most=torch.full((count,), steps, device=device),
            is_drawn=torch.zeros(count, dtype=torch.bool, device=device),
            filtered_from=torch.full((count, 1), steps, device=device),
            uniforms=torch.zeros(count, steps, dtype=torch.float64, device=device),
        )

    def first(self, count: int) -> DrawState:
        """Return the state of the first `count` slots, in the same memory."""
        return DrawState(*(tensor[:count] for tensor in vars(self).values()))

    def begin(self, numbers: Tensor) -> None:
        """Start with the values of `SpeechRequest.numbers`, float64 [slots, n]."""
        settings, history, uniforms = numbers.tensor_split(
            [SETTINGS, SETTINGS + REPETITION_WINDOW], 1
        )
        self.temperature.copy_(settings[:, :1])
        self.fewest.copy_(settings[:, 1])
        self.most.copy_(settings[:, 2])
        self.is_drawn.copy_(settings[:, 3])
        self.filtered_from.copy_(settings[:, 4:])
        self.drawn.fill_(-1)
        self.drawn[:, :REPETITION_WINDOW] = history
        self.uniforms.copy_(uniforms)
        self.step.zero_()

    @property
    def tokens(self) -> Tensor:
        """The drawn tokens [slots, steps]; -1 for those that are not drawn yet."""
        return self.drawn[:, REPETITION_WINDOW:]


class TalkerSteps:
    """Steps of one token per slot. They never wait for the device."""

    def __init__(
        self,
        network: SpeechNetwork,
        state: DrawState,
        *,
        has_draws: bool = True,
        has_filter: bool = True,
    ) -> None:
        """Without `has_draws` or `has_filter` the kernels for draws or filters are left out."""
        self._network, self.state = network, state
        self._has_draws, self._has_filter = has_draws, has_filter
        self._window = torch.arange(REPETITION_WINDOW, device=state.drawn.device)

    def run(self, rows: Rows) -> None:
        """Feed the last token of each slot into these rows, and draw the next one."""
        state = self.state
        last = state.drawn.index_select(1, state.step + (REPETITION_WINDOW - 1)).squeeze(1)
        embeds = self._network.embed_tokens(last.clamp(min=0))
        self.choose(self._network.model(embeds, rows))

    def choose(self, hidden: Tensor) -> None:
        """Draw the next token of each slot from hidden states [slots, width]."""
        network, state = self._network, self.state
        recent = state.drawn.index_select(1, state.step + self._window)
        scores = network.score(hidden) / state.temperature
        scores = penalise(scores, recent.clamp(min=0), recent >= 0)
        if self._has_filter:
            scores = torch.where(state.step >= state.filtered_from, filter_top(scores), scores)
        scores[:, network.end] += torch.where(state.step < state.fewest, float("-inf"), 0.0)
        token = scores.argmax(-1)
        if self._has_draws or network.on_step is not None:
            probabilities = scores.softmax(-1)
            if network.on_step is not None:
                network.on_step(probabilities)
            uniforms = state.uniforms.index_select(1, state.step).squeeze(1)
            token = torch.where(state.is_drawn, draw(probabilities, uniforms), token)
        state.drawn.index_copy_(1, state.step + REPETITION_WINDOW, token[:, None])
        state.step.add_(1)

    def have_ended(self) -> Tensor:
        """Return bool [slots]: whether the slot has drawn the end of speech, or all its tokens."""
        state = self.state
        return (state.drawn == self._network.end).any(-1) | (state.step >= state.most)
