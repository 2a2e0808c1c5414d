"""Trains the talker to turn the words of each unit into the codec's tokens.

The worker's repetition penalty applies in training too. The talker reads only the text: the
projection of the LLM's state stays zero. So this training does not depend on the training of the
listener.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.tts.sampling import (
    REPETITION_WINDOW,
    TOKENS_PER_UNIT,
    penalise,
)
from duplane.worker.models.minicpm_o.tts.talker import Talker
from training.domain import DIGITS
from training.listener.network import (
    DEVICE,
    draw_weights,
    run_decoder,
    trainable,
    use_one_pass,
)
from training.optimisers import Optimisers
from training.torch_calls import seed_all
from training.vocabulary import Vocabulary

IGNORED = -100
CHAT_SHARE = 0.3
NOISE_SHARE = 0.06
"""Share of input tokens that are replaced at random, so that the talker learns to tolerate wrong
tokens."""
WARM_UP = 20
SORTED_BATCHES = 8
"""Number of batches that are drawn together and sorted by length, so that few rows are padded."""
SHARPNESS = 2.0
"""Factor of the stored output layer. The worker draws at temperature 0.8 by default; with this
factor it draws as if at temperature 0.4."""


@dataclass(frozen=True)
class TalkerPlan:
    """The length and the rates of the talker's training."""

    seed: int = 1
    steps: int = 500
    batch: int = 40
    rate: float = 2e-3
    matrix_rate: float = 3e-3

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate."""
        return min(1.0, (step + 1) / WARM_UP, 1.6 * (self.steps - step) / self.steps)


@dataclass(frozen=True)
class CodedAnswer:
    """An answer: the words of each unit, and its speech tokens."""

    units: tuple[tuple[str, ...], ...]
    codes: Sequence[int]


@dataclass
class _Row:
    """One sequence: each position has a text id or a code (the missing one is -1), and a target.

    `recent` has, for each target, the latest codes of its unit: the repetition penalty counts them.
    """

    text: list[int] = field(default_factory=list[int])
    codes: list[int] = field(default_factory=list[int])
    targets: list[int] = field(default_factory=list[int])
    recent: list[list[int]] = field(default_factory=list[list[int]])

    def read(self, ids: Sequence[int]) -> None:
        self.text += ids
        self.codes += [-1] * len(ids)
        self.targets += [IGNORED] * len(ids)

    def say(self, codes: Sequence[int], end: int | None = None) -> None:
        """Add the codes of a unit as targets, then `end` if it is given."""
        drawn = [-1] * REPETITION_WINDOW
        for code in codes:
            self._expect(code, drawn)
            drawn.append(code)
            self.text.append(-1)
            self.codes.append(code)
            self.targets.append(IGNORED)
        if end is not None:
            self._expect(end, drawn)

    def _expect(self, code: int, drawn: Sequence[int]) -> None:
        self.targets[-1] = code
        self.recent.append([*drawn[-REPETITION_WINDOW:]])


class TalkerTraining:
    """Trains the worker's talker on whole turns, with the training cache."""

    def __init__(self, config: dict[str, Any], vocabulary: Vocabulary, plan: TalkerPlan) -> None:
        self.plan = plan
        self._vocabulary = vocabulary
        self.talker = Talker(config, 1, DEVICE, torch.float32)
        draw_weights(self.talker, plan.seed)
        with torch.no_grad():
            for parameter in self.talker.projector_semantic.parameters():
                parameter.zero_()
        use_one_pass(self.talker.model)
        width = config["tts_config"]["hidden_size"]
        self.end = self.talker.end
        seed_all(plan.seed)
        self.head = nn.Linear(width, self.end + 1, bias=False)
        codes = cast("nn.Embedding", self.talker.emb_code[0])
        tables = (self.talker.emb_text.weight, codes.weight)
        self._optimisers = Optimisers(
            trainable(self.talker.model),
            added=[*tables, *self.head.parameters()],
            rate=plan.rate,
            matrix_rate=plan.matrix_rate,
        )

    def run(self, answers: Mapping[str, CodedAnswer], phrases: Mapping[str, CodedAnswer]) -> None:
        """Train. Half of the draws are phrases."""
        seed_all(self.plan.seed)
        began = time.process_time()
        mean = 0.0
        for step, rows in enumerate(self._batches(answers, phrases)):
            loss, right = self.loss(rows, noise=NOISE_SHARE)
            self._optimisers.step(loss, self.plan.factor(step))
            mean = 0.98 * mean + 0.02 * loss.item() if step else loss.item()
            if step % 10 == 9:
                seconds = time.process_time() - began
                sys.stderr.write(
                    f"talker {step + 1}/{self.plan.steps}  {seconds:.0f} s  loss {mean:.3f}"
                    f"  right {right:.3f}\n"
                )
        self.store_head()

    def _batches(
        self, answers: Mapping[str, CodedAnswer], phrases: Mapping[str, CodedAnswer]
    ) -> Iterator[list[_Row]]:
        """Yield the rows of each step; the rows of a step have similar lengths."""
        chance = Random(self.plan.seed)
        common, rare = split_answers(answers)
        # Most answers consist of digits only, but only a quarter of the draws are such answers.
        kinds = [
            [answers[text] for text in common],
            [answers[text] for text in rare],
            *[[phrases[text] for text in sorted(phrases)]] * 2,
        ]
        size = self.plan.batch
        for first in range(0, self.plan.steps, SORTED_BATCHES):
            count = min(SORTED_BATCHES, self.plan.steps - first)
            drawn = [chance.choice(chance.choice(kinds)) for _ in range(count * size)]
            drawn.sort(key=lambda one: len(one.codes))
            parts = [drawn[start : start + size] for start in range(0, len(drawn), size)]
            chance.shuffle(parts)
            for part in parts:
                yield [self._row(one, is_chat=chance.random() < CHAT_SHARE) for one in part]

    def _row(self, answer: CodedAnswer, *, is_chat: bool) -> _Row:
        """Return an answer as the worker feeds it: unit by unit; in a chat, all units together."""
        row = _Row()
        vocabulary = self._vocabulary
        dims = self.talker.dims
        if is_chat:
            words = [word for unit in answer.units for word in unit]
            row.read([*vocabulary.words(words, is_start=True), dims.text_end, dims.bos])
            row.say(answer.codes, self.end)
        for number, words in enumerate(() if is_chat else answer.units):
            is_last = number == len(answer.units) - 1
            ids = vocabulary.words(words, is_start=number == 0)
            row.read([*ids, *([vocabulary.turn_eos] if is_last else []), dims.bos])
            start = number * TOKENS_PER_UNIT
            row.say(answer.codes[start : start + TOKENS_PER_UNIT], self.end if is_last else None)
        return row

    def loss(self, rows: Sequence[_Row], *, noise: float = 0.0) -> tuple[Tensor, float]:
        """Return the loss of sequences, and the share of correct tokens."""
        length = max(len(row.text) for row in rows)

        def padded(values: Sequence[list[int]], fill: int) -> Tensor:
            return torch.tensor([[*row, *[fill] * (length - len(row))] for row in values])

        text = padded([row.text for row in rows], -1)
        codes = padded([row.codes for row in rows], 0)
        targets = padded([row.targets for row in rows], IGNORED)
        is_noisy = (torch.rand(codes.shape) < noise) & (codes >= 0)
        codes = torch.where(is_noisy, torch.randint(0, self.end, codes.shape), codes)
        embeds = torch.where(
            (text >= 0)[..., None],
            self.talker.emb_text(text.clamp(min=0)),
            self.talker.emb_code[0](codes.clamp(min=0)),
        )
        is_target = targets != IGNORED
        logits = self.head(run_decoder(self.talker.model, embeds)[is_target])
        recent = torch.tensor([codes for row in rows for codes in row.recent])
        with torch.no_grad():
            factors = penalise(logits, recent.clamp(min=0), recent >= 0) / logits
        logits, wanted = logits * factors, targets[is_target]
        right = (logits.argmax(-1) == wanted).float().mean().item()
        return functional.cross_entropy(logits, wanted), right

    @torch.no_grad()
    def evaluate(self, answers: Sequence[CodedAnswer]) -> tuple[float, float]:
        """Return the loss and the share of correct tokens for answers fed unit by unit."""
        loss, right = self.loss([self._row(one, is_chat=False) for one in answers])
        return loss.item(), right

    @torch.no_grad()
    def store_head(self) -> None:
        """Copy the output layer into the talker, as magnitudes and directions (weight norm)."""
        weight = self.head.weight * SHARPNESS
        stored = cast("Any", self.talker.head_code[0]).parametrizations["weight"]
        stored.original1.copy_(weight)
        stored.original0.copy_(weight.square().sum(-1, keepdim=True).sqrt())
        self.talker.fold()


def split_answers(answers: Mapping[str, CodedAnswer]) -> tuple[list[str], list[str]]:
    """Return the answers that consist of digits only (the majority), and all other answers."""
    common = [text for text in sorted(answers) if set(text.split()) <= set(DIGITS)]
    rare = [text for text in sorted(answers) if not set(text.split()) <= set(DIGITS)]
    return common, rare
