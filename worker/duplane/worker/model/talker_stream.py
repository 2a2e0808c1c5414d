"""The talker for chat answers: an answer is spoken passage by passage, over one stretch of cache,
or, where the checkpoint says `sliding_recompute`, each over the one before alone.

Each passage ends where the talker ends it. It is drawn in short runs of steps, so that speaking
never holds the device for long; a slot's draws depend neither on the runs nor on other slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duplane.worker.model.sampling import Uniforms, draw
from duplane.worker.model.speech_steps import (
    REPETITION_PENALTY,
    REPETITION_WINDOW,
    TOKENS_PER_UNIT,
)
from duplane.worker.model.talker import Talker
from duplane.worker.model.transfer import download, upload

PASSAGE_STEPS = 500
TOP_P = 0.85
TOP_K = 25
FEWEST_KEPT = 3


@dataclass
class Passage:
    """What a passage was spoken of, and what became of it."""

    condition: Tensor
    tokens: list[int] = field(default_factory=list[int])


@dataclass
class SpeechStream:
    """What one slot is saying: its passage, and what it said before.

    One uniform is used up per drawn token. `said` are the last tokens, of all passages; `passage`
    is the one that is spoken, or was the last, `earlier` the one before.
    """

    slot: int
    uniforms: Uniforms
    is_greedy: bool
    temperature: float
    condition: Tensor | None = None
    steps: int = 0
    steps_left: int = 0
    shortest: int = 0
    unfed: int | None = None
    said: list[int] = field(default_factory=list[int])
    passage: Passage | None = None
    earlier: Passage | None = None

    def reset(self) -> None:
        """Begin an answer; nothing was said before."""
        self.said, self.unfed, self.passage, self.earlier = [], None, None, None

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are drawn; else the most likely ones are taken."""
        return not self.is_greedy and self.temperature > 0

    @property
    def is_silent(self) -> bool:
        """Whether the passage is over."""
        return self.steps_left == 0

    def say(self, condition: Tensor, *, shortest: int = 0, longest: int = PASSAGE_STEPS) -> None:
        """Begin a passage with its condition rows [rows, width].

        The talker may end it after `shortest` tokens; it is cut off after `longest`.
        """
        if not self.is_silent:
            raise ValueError(f"slot {self.slot} has not finished its passage")
        self.condition, self.steps, self.steps_left = condition, 0, longest
        self.shortest = shortest
        self.earlier, self.passage = self.passage, Passage(condition)

    def take(self, drawn: list[int], end: int) -> list[int]:
        """Take the tokens of a run, perhaps with the passage's end; returns those to be heard."""
        has_ended = end in drawn
        tokens = drawn[: drawn.index(end)] if has_ended else drawn
        self.uniforms.advance(len(tokens) + has_ended if self.is_drawn else 0)
        if self.passage is not None:
            self.passage.tokens += tokens
        self.steps += len(tokens)
        self.steps_left = 0 if has_ended else self.steps_left - len(tokens)
        self.unfed = None if has_ended else tokens[-1]
        self.condition = None
        self.said = [*self.said, *tokens][-REPETITION_WINDOW:]
        return tokens


@torch.inference_mode()
def advance(
    talker: Talker, streams: Sequence[SpeechStream], limit: int = TOKENS_PER_UNIT
) -> list[list[int]]:
    """Draw up to `limit` tokens of each stream's passage, together; slots ascending.

    An answer that outgrows the talker's cache goes on without what was said before.
    """
    embeds = [_unfed_rows(talker, stream) for stream in streams]
    for stream, rows in zip(streams, embeds, strict=True):
        _make_room(talker, stream, len(rows), limit)
    budgets = [min(limit, stream.steps_left) for stream in streams]
    counts = [(stream.slot, len(rows)) for stream, rows in zip(streams, embeds, strict=True)]
    starts = [talker.cache.length(slot) + count for slot, count in counts]
    rows = talker.cache.extend(counts)
    hidden = talker.model(torch.cat(embeds), rows)[rows.last]
    drawn = _draw(talker, streams, hidden, budgets)
    spoken: list[list[int]] = []
    for stream, start, tokens, budget in zip(streams, starts, drawn, budgets, strict=True):
        heard = stream.take(tokens[:budget], talker.end)
        fed = len(heard) if stream.unfed is None else len(heard) - 1
        talker.cache.truncate(stream.slot, start + fed)
        spoken.append(heard)
    return spoken


def _unfed_rows(talker: Talker, stream: SpeechStream) -> Tensor:
    """What the talker has not seen: its own last token, and the condition of a new passage.

    Recomputing, a new passage forgets all but the one before it, which is seen anew.
    """
    table = talker.emb_code[0]
    device = talker.emb_text.weight.device
    if talker.dims.is_recomputing and stream.condition is not None:
        talker.cache.truncate(stream.slot, 0)
        if stream.earlier is None:
            return stream.condition
        tokens = upload(stream.earlier.tokens, device, torch.long)
        return torch.cat((stream.earlier.condition, table(tokens), stream.condition))
    rows = [] if stream.unfed is None else [table(upload([stream.unfed], device))]
    if stream.condition is not None:
        rows.append(stream.condition)
    return torch.cat(rows)


def _make_room(talker: Talker, stream: SpeechStream, rows: int, limit: int) -> None:
    cache = talker.cache
    if cache.length(stream.slot) + rows + limit > cache.capacity:
        cache.truncate(stream.slot, 0)


def _draw(
    talker: Talker, streams: Sequence[SpeechStream], hidden: Tensor, budgets: Sequence[int]
) -> list[list[int]]:
    """Draw tokens step by step; what follows a stream's end, or its budget, has no meaning."""
    plan = _Plan.of(streams, budgets, hidden.device)
    steps = max(budgets)
    drawn = torch.zeros(len(streams), steps, dtype=torch.long, device=hidden.device)
    recent, has_ended = plan.recent, torch.zeros_like(plan.is_drawn)
    step = 0
    for step in range(steps):
        if step:
            rows = talker.cache.extend([(stream.slot, 1) for stream in streams])
            hidden = talker.model(talker.emb_code[0](drawn[:, step - 1]), rows)
        scores = talker.head_code[0](hidden).float() / plan.temperature
        scores = _penalised(scores, recent)
        drawn[:, step] = plan.choose(scores, step, talker.end)
        recent = torch.cat((recent[:, 1:], drawn[:, step, None]), dim=-1)
        has_ended |= (drawn[:, step] == talker.end) | (step + 1 >= plan.budgets)
        if bool(download(has_ended.all())):
            break
    return download(drawn[:, : step + 1]).tolist()


@dataclass(frozen=True)
class _Plan:
    """The per-slot numbers of one run, on the device, rows in its order.

    `recent` [slots, window] are the last tokens said, -1 where there are none.
    """

    temperature: Tensor
    shortest: Tensor
    budgets: Tensor
    recent: Tensor
    uniforms: Tensor
    is_drawn: Tensor
    is_filtered: Tensor
    has_draws: bool

    @staticmethod
    def of(streams: Sequence[SpeechStream], budgets: Sequence[int], device: torch.device) -> _Plan:
        is_drawn = [stream.is_drawn for stream in streams]
        most = max(budgets)
        ahead = [
            stream.uniforms.peek(most) if stream.is_drawn else [0.0] * most for stream in streams
        ]
        recent = [[-1] * (REPETITION_WINDOW - len(s.said)) + s.said for s in streams]
        shortest = [stream.shortest - stream.steps for stream in streams]
        return _Plan(
            temperature=upload([[s.temperature or 1.0] for s in streams], device),
            shortest=upload(shortest, device),
            budgets=upload(budgets, device),
            recent=upload(recent, device),
            uniforms=upload(ahead, device, torch.float64),
            is_drawn=upload(is_drawn, device),
            is_filtered=upload([bool(stream.said) for stream in streams], device),
            has_draws=any(is_drawn),
        )

    def choose(self, scores: Tensor, step: int, end: int) -> Tensor:
        """One token per slot; the very first of an answer is drawn from all of them."""
        filtered = scores
        if self.has_draws:
            is_filtered = self.is_filtered | (step > 0)
            filtered = torch.where(is_filtered[:, None], _filtered(scores), scores)
        filtered[:, end] += torch.where(step < self.shortest, float("-inf"), 0.0)
        likeliest = filtered.argmax(-1)
        if not self.has_draws:
            return likeliest
        chosen = draw(filtered.softmax(-1), self.uniforms[:, step])
        return torch.where(self.is_drawn, chosen, likeliest)


def _penalised(scores: Tensor, recent: Tensor) -> Tensor:
    """Push down tokens by how often each occurs in `recent`; as `talker.penalise` does."""
    counts = torch.zeros_like(scores).scatter_add_(
        1, recent.clamp(min=0), (recent >= 0).to(scores.dtype)
    )
    factors = REPETITION_PENALTY**counts
    return torch.where(scores < 0, scores * factors, scores / factors)


def _filtered(scores: Tensor) -> Tensor:
    """Keep the nucleus of mass `TOP_P`, of it at most the `TOP_K` best, and never under three."""
    ranked = scores.topk(min(TOP_K, scores.shape[-1]), dim=-1).values
    mass = (ranked - scores.logsumexp(-1, keepdim=True)).exp()
    before = mass.cumsum(-1) - mass
    is_first = torch.arange(ranked.shape[-1], device=scores.device) < FEWEST_KEPT
    kept = ((before < TOP_P) | is_first).sum(-1, keepdim=True)
    floor = ranked.gather(-1, kept - 1)
    return scores.masked_fill(scores < floor, float("-inf"))
