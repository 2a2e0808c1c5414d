"""The talker as a block: conditions of several slots in one pass, then one step for each token.

All numbers of a launch, with the random numbers of its draws, are sent in one upload. The host does
not wait between the steps: it reads all tokens at the end, and cuts them at the end of speech.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm.cuda_graphs import PassForm, PassGraphs
from duplane.worker.models.minicpm_o.llm.operations import varied
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.proof import FIRST_ROWS, relative_error
from duplane.worker.models.minicpm_o.transfer import refill
from duplane.worker.models.minicpm_o.tts.sampling import (
    REPETITION_WINDOW,
    SETTINGS,
    UNIT_DRAWS,
    SpeechRequest,
)
from duplane.worker.models.minicpm_o.tts.steps import DrawState, SpeechNetwork, TalkerSteps

WIDTHS = (4, 16, 64)
"""Numbers of slots of a step."""
CONDITION_ROWS = (32, 128, 768)
"""Numbers of rows of the conditions of a launch."""
Run = Callable[[], None]


class TalkBlock:
    """Speech of up to 64 slots with at most 768 rows of conditions."""

    def __init__(self, network: SpeechNetwork, hidden_size: int) -> None:
        self.network, self.cache = network, network.model.cache
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
        self.settings[:] = torch.ones_like(self.settings, dtype=torch.float64).view(torch.long)
        self.embeds = like.new_zeros(CONDITION_ROWS[-1], hidden_size)
        self.state = DrawState.allocate(self.width, like.device)
        self._conditions = PassGraphs[ConditionPass](self.cache, "conditions of the talker")
        self._steps = PassGraphs[StepPass](self.cache, "talker")

    def draw(self, requests: Sequence[SpeechRequest]) -> Tensor | None:
        """Draw tokens [slots, n] for requests, slots ascending; None if no pass has their size.

        Afterwards the cache holds the conditions and all tokens but the last.
        """
        rows = sum(len(request.condition) for request in requests)
        condition, steps = self._conditions.find(rows), self._steps.find(len(requests))
        most = max(request.most for request in requests)
        if condition is None or steps is None or most > UNIT_DRAWS:
            return None
        return self._launch(requests, condition, steps, most)

    def _launch(
        self,
        requests: Sequence[SpeechRequest],
        conditions: tuple[ConditionPass, Run],
        steps: tuple[StepPass, Run],
        most: int,
    ) -> Tensor:
        (condition, feed), (step, run) = conditions, steps
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
        feed()
        for _ in range(1, most):
            run()
        return self.state.tokens[:count, :most]

    def capture(self, *, is_replayed: bool = True) -> None:
        """Capture the passes as CUDA graphs; see `PassGraphs.capture`."""
        widths = {min(width, self.width) for width in WIDTHS}
        condition, step = partial(ConditionPass, self), partial(StepPass, self)
        self._conditions.capture(
            CONDITION_ROWS, condition, self._check_conditions, is_replayed=is_replayed
        )
        self._steps.capture(widths, step, self._check_steps, is_replayed=is_replayed)

    def _check_conditions(self, condition: ConditionPass, feed: Run) -> float:
        """Compare a pass of conditions with the plain path."""
        rows = condition.form.rows
        requests = self._trial(min(rows, self.width), rows)
        steps = StepPass(self, self.width)
        return self._compare(requests, (condition, feed), (steps, steps.run), 1)

    def _check_steps(self, steps: StepPass, run: Run) -> float:
        """Compare a step with the plain path."""
        requests = self._trial(steps.form.rows, FIRST_ROWS * steps.form.rows)
        condition = ConditionPass(self, CONDITION_ROWS[-1])
        return self._compare(requests, (condition, condition.run), (steps, run), 2)

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
        self,
        requests: Sequence[SpeechRequest],
        conditions: tuple[ConditionPass, Run],
        steps: tuple[StepPass, Run],
        draws: int,
    ) -> float:
        """Compare the last of these draws, and the keys of the last rows, with the plain path."""
        slots = [request.slot for request in requests]
        starts = [self.cache.length(slot) for slot in slots]
        drawn = self._launch(requests, conditions, steps, draws).clone()
        keys = self._last_keys(slots)
        for slot, start in zip(slots, starts, strict=True):
            self.cache.rewind(slot, start)
        network, seen = self.network, list[Tensor]()
        plain = TalkerSteps(network, DrawState.allocate(len(slots), drawn.device))
        plain.state.step.zero_()
        network.on_step = seen.append
        rows = self.cache.extend([(request.slot, len(request.condition)) for request in requests])
        embeds = torch.cat([request.condition for request in requests])
        plain.choose(network.model(embeds, rows)[rows.last])
        for draw in range(1, draws):
            # The first tokens may differ by rounding; the next step begins with the same ones.
            plain.state.tokens[:, draw - 1] = drawn[:, draw - 1]
            plain.run(self.cache.extend([(slot, 1) for slot in slots]))
        network.on_step = None
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


class ConditionPass:
    """Feeds the packed condition rows of all slots, and draws the first token of each slot."""

    def __init__(self, block: TalkBlock, rows: int) -> None:
        self._block = block
        self.form = PassForm(block.cache, rows, block.width)
        self._steps = TalkerSteps(block.network, block.state)
        refill(block.condition_numbers[: self.form.count], self.form.numbers())

    def run(self) -> None:
        """Run the pass. It never waits for the device, so that a CUDA graph can capture it."""
        block = self._block
        block.state.begin(block.settings.view(torch.float64).view(block.width, -1))
        rows = self.form.rows_of(block.condition_numbers)
        self._steps.choose(block.network.model(block.embeds[: self.form.rows], rows)[rows.last])


class StepPass:
    """Feeds the last token of each slot, and draws the next one."""

    def __init__(self, block: TalkBlock, width: int) -> None:
        self._block = block
        self.form = PassForm(block.cache, width, width)
        self._steps = TalkerSteps(block.network, block.state.first(width))
        refill(block.step_numbers[: self.form.count], self.form.numbers())

    def run(self) -> None:
        """Run the step. It never waits for the device, so that a CUDA graph can capture it."""
        rows = self.form.rows_of(self._block.step_numbers)
        self._steps.run(rows)
        rows.positions.add_(1).clamp_(max=self._block.cache.capacity - 1)
