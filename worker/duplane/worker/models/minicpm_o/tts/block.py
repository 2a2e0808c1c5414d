"""The talker as a block: conditions of several slots in one pass, then one step for each token.

All numbers of a launch, with the random numbers of its draws, are sent in one upload. The host does
not wait between the steps: it reads all tokens at the end, and cuts them at the end of speech.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm.attention import Rows
from duplane.worker.models.minicpm_o.llm.cuda_graphs import PassForm, PassGraphs, StaticPass
from duplane.worker.models.minicpm_o.llm.operations import varied
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.proof import FIRST_ROWS, relative_error
from duplane.worker.models.minicpm_o.transfer import refill
from duplane.worker.models.minicpm_o.tts.sampling import (
    REPETITION_WINDOW,
    SETTINGS,
    UNIT_DRAWS,
    DrawState,
    SpeechRequest,
)
from duplane.worker.models.minicpm_o.tts.talker import Talker

WIDTHS = (4, 16, 64)
"""Numbers of slots of a step."""
CONDITION_ROWS = (32, 128, 768)
"""Numbers of rows of the conditions of a launch."""


class TalkBlock:
    """Speech of up to 64 slots with at most 768 rows of conditions."""

    def __init__(self, talker: Talker) -> None:
        self.talker, self.cache = talker, talker.cache
        self.width = min(WIDTHS[-1], self.cache.slot_count)
        like = self.cache.keys
        # The numbers of a launch: settings of all draws, then those of steps, then of conditions.
        self._sizes = (
            self.width * (SETTINGS + REPETITION_WINDOW + UNIT_DRAWS),
            PassForm(self.cache, self.width, self.width).count,
            PassForm(self.cache, CONDITION_ROWS[-1], self.width).count,
        )
        self._numbers = torch.zeros(sum(self._sizes), dtype=torch.long, device=like.device)
        self.settings, self.step_numbers, self.condition_numbers = self._numbers.split_with_sizes(
            self._sizes
        )
        settings = self.settings.view(torch.float64).view(self.width, -1)
        self.state = DrawState.allocate(settings.fill_(1.0))
        self.embeds = like.new_zeros(CONDITION_ROWS[-1], talker.dims.decoder.hidden_size)
        self._conditions = PassGraphs[StaticPass](self.cache, "conditions of the talker")
        self._steps = PassGraphs[StaticPass](self.cache, "talker")

    def draw(self, requests: Sequence[SpeechRequest]) -> Tensor | None:
        """Draw tokens [slots, n] for requests, slots ascending; None if no pass has their size.

        Afterwards the cache holds the conditions and all tokens but the last.
        """
        rows = sum(len(request.condition) for request in requests)
        condition, step = self._conditions.find(rows), self._steps.find(len(requests))
        most = max(request.most for request in requests)
        if condition is None or step is None or most > UNIT_DRAWS:
            return None
        return self._launch(requests, condition, step, most)

    def _launch(
        self, requests: Sequence[SpeechRequest], condition: StaticPass, step: StaticPass, most: int
    ) -> Tensor:
        slots, count = [request.slot for request in requests], len(requests)
        starts = [self.cache.length(slot) for slot in slots]
        rows = [len(request.condition) for request in requests]
        self.cache.grow([(slot, own + most - 1) for slot, own in zip(slots, rows, strict=True)])
        settings = np.ones((self.width, self._sizes[0] // self.width))
        settings[:count] = [request.numbers(UNIT_DRAWS) for request in requests]
        after = [start + own for start, own in zip(starts, rows, strict=True)]
        stepping = np.zeros(self._sizes[1], np.int64)
        stepping[: step.form.count] = step.form.numbers([(slot, 1) for slot in slots], after)
        feeding = condition.form.numbers(list(zip(slots, rows, strict=True)), starts)
        numbers = np.concatenate((settings.ravel().view(np.int64), stepping, feeding))
        refill(self._numbers[: len(numbers)], numbers)
        torch.cat([request.condition for request in requests], out=self.embeds[: sum(rows)])
        condition.launch()
        for _ in range(1, most):
            step.launch()
        return self.state.tokens[:count, :most]

    def capture(self, *, is_replayed: bool = True) -> None:
        """Capture the passes as CUDA graphs, which the talker then uses; see `PassGraphs`."""
        widths = {min(width, self.width) for width in WIDTHS}
        self._conditions.capture(
            CONDITION_ROWS, self._condition_pass, self._check_conditions, is_replayed=is_replayed
        )
        self._steps.capture(widths, self._step_pass, self._check_steps, is_replayed=is_replayed)
        self.talker.block = self

    def _condition_pass(self, rows: int) -> StaticPass:
        """Make a pass that feeds packed conditions, and draws the first token of each slot."""

        def feed(packed: Rows) -> None:
            self.state.begin()
            self.talker.begin(self.state, self.embeds[:rows], packed)

        return StaticPass(PassForm(self.cache, rows, self.width), self.condition_numbers, feed)

    def _step_pass(self, width: int) -> StaticPass:
        """Make a pass that feeds the last token of each slot, and draws the next one."""
        state = self.state.first(width)

        def step(rows: Rows) -> None:
            self.talker.step(state, rows)
            rows.positions.add_(1).clamp_(max=self.cache.capacity - 1)

        return StaticPass(PassForm(self.cache, width, width), self.step_numbers, step)

    def _check_conditions(self, condition: StaticPass) -> float:
        """Compare a pass of conditions with the plain path."""
        rows = condition.form.rows
        requests = self._trial(min(rows, self.width), rows)
        return self._compare(requests, condition, self._step_pass(self.width), 1)

    def _check_steps(self, step: StaticPass) -> float:
        """Compare a step with the plain path."""
        requests = self._trial(step.form.rows, FIRST_ROWS * step.form.rows)
        return self._compare(requests, self._condition_pass(CONDITION_ROWS[-1]), step, 2)

    def _trial(self, slots: int, rows: int) -> list[SpeechRequest]:
        """Return requests of this many slots and at most `rows` rows, in one long context.

        The other contexts are short. All slots must be empty.
        """
        own = max(1, min(rows // slots, self.cache.capacity - 2))
        self.cache.grow([(0, self.cache.capacity - own - 1)])
        conditions = varied(slots, own, self.embeds.shape[1], like=self.embeds)
        return [
            SpeechRequest(slot, condition, SeededUniforms(0), is_greedy=True, temperature=0.0)
            for slot, condition in enumerate(conditions.unbind())
        ]

    def _compare(
        self, requests: Sequence[SpeechRequest], condition: StaticPass, step: StaticPass, draws: int
    ) -> float:
        """Compare the last of these draws, and the keys of the last rows, with the plain path."""
        slots = [request.slot for request in requests]
        starts = [self.cache.length(slot) for slot in slots]
        drawn = self._launch(requests, condition, step, draws).clone()
        keys = self._last_keys(slots)
        for slot, start in zip(slots, starts, strict=True):
            self.cache.rewind(slot, start)
        talker, seen = self.talker, list[Tensor]()
        plain = DrawState.of(requests, UNIT_DRAWS, drawn.device)
        talker.on_step = seen.append
        rows = self.cache.extend([(request.slot, len(request.condition)) for request in requests])
        talker.begin(plain, torch.cat([request.condition for request in requests]), rows)
        for draw in range(1, draws):
            # The first tokens may differ by rounding; the next step begins with the same ones.
            plain.tokens[:, draw - 1] = drawn[:, draw - 1]
            talker.step(plain, self.cache.extend([(slot, 1) for slot in slots]))
        talker.on_step = None
        likely, chosen = seen[-1].log(), drawn[:, -1:]
        return relative_error(
            [
                (keys, self._last_keys(slots)),
                (likely.gather(1, chosen), likely.amax(1, keepdim=True)),
            ]
        )

    def _last_keys(self, slots: Sequence[int]) -> Tensor:
        """Return the keys of the last row of each slot."""
        return torch.stack([self.cache.read(slot)[0][:, :, -1] for slot in slots])
