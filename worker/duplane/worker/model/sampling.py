"""Choosing ids from logits, for many slots at once, each with its own parameters and draws.

Draw order of a conversation, which makes a seeded one reproducible: per text step one uniform
for the chunk-end test, then, unless that test ended the chunk or `listen_top_k` decided, one
for the id; per talker step one uniform. A draw picks the first id whose cumulative probability
(float64, ids ascending) exceeds the uniform, so nothing depends on the batch or the device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from duplane.worker.model.tokens import Tokens
from duplane.worker.model.transfer import download, upload
from duplane.worker.model.types import ConversationOptions, DecodeMode


class Uniforms(Protocol):
    """A conversation's source of uniform numbers in [0, 1)."""

    def peek(self, count: int) -> list[float]:
        """The next `count` numbers, without using them up."""
        ...

    def advance(self, count: int) -> None:
        """Use up `count` numbers."""
        ...


class SeededUniforms:
    """Uniforms of a generator of the conversation's own."""

    _BLOCK = 64

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._ahead: deque[float] = deque()

    def peek(self, count: int) -> list[float]:
        while len(self._ahead) < count:
            block = torch.rand(self._BLOCK, generator=self._generator, dtype=torch.float64)
            self._ahead.extend(block.numpy().tolist())
        return [self._ahead[index] for index in range(count)]

    def advance(self, count: int) -> None:
        self.peek(count)
        for _ in range(count):
            self._ahead.popleft()


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one id per row of `[rows, ids]`; `uniforms` [rows] are float64. Returns [rows]."""
    cumulative = probabilities.double().cumsum(-1)
    thresholds = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    drawn = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    return drawn.clamp(max=probabilities.shape[-1] - 1)


class Decision(IntEnum):
    """Why an id was chosen."""

    CHUNK_END = 0
    LISTEN_RANK = 1
    CHOICE = 2
    NOT_FINITE = 3

    @property
    def draw_count(self) -> int:
        """How many uniforms a sampled decision of this kind uses up."""
        return 2 if self is Decision.CHOICE else 1


class TextSampling:
    """The text sampling parameters and the repetition windows of all slots, on the device."""

    def __init__(
        self, tokens: Tokens, vocabulary: int, slot_count: int, device: torch.device
    ) -> None:
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._device = device
        self._forbidden = torch.tensor(tokens.forbidden, device=device)
        self._numbers = torch.zeros(slot_count, len(fields(_Row)), device=device)
        self._seen = torch.zeros(slot_count, vocabulary, dtype=torch.bool, device=device)
        self._windows: list[_Window | None] = [None] * slot_count
        self._greedy = [True] * slot_count
        self._widest = [0] * slot_count

    @property
    def memory_bytes(self) -> int:
        """The size of the per-slot tensors."""
        return self._numbers.nbytes + self._seen.nbytes

    def open(self, slot: int, options: ConversationOptions) -> None:
        """Take the parameters of a new conversation."""
        numbers = _numbers(options, self._vocabulary)
        self._numbers[slot] = upload(numbers, self._device)
        self._windows[slot] = _Window(options.text_repetition_window_size)
        self._greedy[slot] = options.decode_mode is DecodeMode.GREEDY
        self._widest[slot] = int(numbers[1])

    def reset(self, slot: int) -> None:
        """Forget the conversation."""
        self._seen[slot].zero_()
        self._numbers[slot].zero_()
        self._windows[slot] = None
        self._greedy[slot] = True

    def is_clean(self, slot: int) -> bool:
        """Verify that nothing of a conversation is left."""
        dirty = self._seen[slot].any() | self._numbers[slot].any()
        return self._windows[slot] is None and not bool(dirty.item())

    def choose(
        self, slots: Sequence[int], logits: Tensor, uniforms: Sequence[Uniforms]
    ) -> list[tuple[int, Decision]]:
        """Decide one step for every slot from raw logits, float32 `[slots, vocabulary]`.

        The chunk-end test looks at the raw logits, at temperature 1; only if it does not choose
        `<|chunk_eos|>` are the penalties and masks applied and the id chosen, so that the model
        alone decides when to pause. Uniforms are used up as the module says. One transfer to
        the host for the whole batch.
        """
        index = upload(slots, self._device)
        row = _Row(*self._numbers[index].unsqueeze(-1).unbind(1))
        is_greedy = [self._greedy[slot] for slot in slots]
        scores = self._penalised(logits, self._seen[index], row)
        is_listen_rank = self._is_listen_rank(scores, row)
        tested, chosen = logits.argmax(-1), scores.argmax(-1)
        if not all(is_greedy):
            ahead = [
                [0.0, 0.0] if greedy else source.peek(2)
                for greedy, source in zip(is_greedy, uniforms, strict=True)
            ]
            numbers = upload(ahead, self._device, torch.float64)
            is_drawn = ~upload(is_greedy, self._device)
            tested = torch.where(is_drawn, draw(logits.softmax(-1), numbers[:, 0]), tested)
            widest = max(
                self._widest[slot]
                for slot, greedy in zip(slots, is_greedy, strict=True)
                if not greedy
            )
            filtered = filter_scores(scores, row.temperature, row.top_k, row.top_p, widest)
            is_drawn = is_drawn & (row.temperature.squeeze(-1) > 0)
            chosen = torch.where(is_drawn, draw(filtered.softmax(-1), numbers[:, 1]), chosen)
        decided = self._decided(logits, tested, chosen, is_listen_rank)
        return self._account(slots, decided, is_greedy, uniforms)

    def _penalised(self, logits: Tensor, seen: Tensor, row: _Row) -> Tensor:
        """Apply the penalties, then forbid ids, in that order (they do not meet).

        The repetition penalty divides whatever the sign, and the listen scale acts on the
        tokenizer's end-of-sequence id, not on `<|listen|>`: so the model was tuned and used.
        """
        scores = torch.where(seen, logits / row.repetition_penalty, logits)
        turn = scores[:, self._tokens.turn_eos, None]
        scaled = torch.where(turn > 0, turn / row.length_penalty, turn * row.length_penalty)
        scores[:, self._tokens.turn_eos] = scaled.squeeze(-1)
        scores[:, self._tokens.eos] *= row.listen_scale.squeeze(-1)
        scores[:, self._forbidden] = float("-inf")
        return scores

    def _is_listen_rank(self, scores: Tensor, row: _Row) -> Tensor:
        """Whether `listen_top_k` decides: [slots]."""
        rank = (scores > scores[:, self._tokens.eos, None]).sum(-1)
        return rank < row.listen_top_k.squeeze(-1)

    def _decided(
        self, logits: Tensor, tested: Tensor, chosen: Tensor, is_listen_rank: Tensor
    ) -> list[list[int]]:
        """Id and kind of every decision, on the host."""
        is_end = tested == self._tokens.chunk_eos
        ids = torch.where(is_listen_rank, self._tokens.eos, chosen)
        ids = torch.where(is_end, self._tokens.chunk_eos, ids)
        kinds = torch.where(is_listen_rank, int(Decision.LISTEN_RANK), int(Decision.CHOICE))
        kinds = torch.where(is_end, int(Decision.CHUNK_END), kinds)
        kinds = torch.where(logits.isfinite().all(-1), kinds, int(Decision.NOT_FINITE))
        return download(torch.stack((ids, kinds), dim=-1)).tolist()

    def _account(
        self,
        slots: Sequence[int],
        decided: list[list[int]],
        is_greedy: Sequence[bool],
        uniforms: Sequence[Uniforms],
    ) -> list[tuple[int, Decision]]:
        """Use up the draws and remember the chosen ids for the repetition penalty."""
        decisions = [(token, Decision(kind)) for token, kind in decided]
        pushed: list[tuple[_Window, int]] = []
        changes: list[tuple[int, int, bool]] = []
        for slot, (token, decision) in zip(slots, decisions, strict=True):
            window = self._windows[slot]
            if decision is Decision.CHOICE and window is not None:
                pushed.append((window, token))
                changes.extend((slot, changed, value) for changed, value in window.changes(token))
        if changes:
            rows, ids, values = upload(changes, self._device).unbind(1)
            self._seen[rows, ids] = values.bool()
        # Nothing can fail from here on, so a choice that failed can be made again.
        for window, token in pushed:
            window.push(token)
        for greedy, source, (_, decision) in zip(is_greedy, uniforms, decisions, strict=True):
            if not greedy:
                source.advance(decision.draw_count)
        return decisions


@dataclass(frozen=True)
class _Row:
    """The parameters of a batch as columns `[slots, 1]`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    repetition_penalty: Tensor
    length_penalty: Tensor
    listen_scale: Tensor
    listen_top_k: Tensor


def _numbers(options: ConversationOptions, vocabulary: int) -> list[float]:
    """The fields of `_Row` for one slot; what is off gets a value that changes nothing."""
    return [
        options.temperature,
        min(options.top_k or vocabulary, vocabulary),
        options.top_p or 2.0,
        options.text_repetition_penalty,
        options.length_penalty,
        options.listen_prob_scale,
        options.listen_top_k or 0,
    ]


class _Window:
    """The last `size` chosen ids; says which ids enter and leave the set of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ids: deque[int] = deque()
        self._counts: Counter[int] = Counter()

    def changes(self, token: int) -> list[tuple[int, bool]]:
        """What a `push` will change: ids, and whether each is then in the set."""
        if not self._size:
            return []
        entering = (token, True)
        if len(self._ids) < self._size:
            return [entering]
        oldest = self._ids[0]
        is_leaving = oldest != token and self._counts[oldest] == 1
        return [entering, (oldest, False)] if is_leaving else [entering]

    def push(self, token: int) -> None:
        """Take one more id, and drop the oldest where there are too many."""
        if not self._size:
            return
        self._ids.append(token)
        self._counts[token] += 1
        if len(self._ids) > self._size:
            oldest = self._ids.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]


def filter_scores(
    scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, widest: int
) -> Tensor:
    """Divide by the temperature and keep the top-k, and of these the nucleus of mass top-p.

    `scores` [rows, ids]; the parameters are columns [rows, 1]; `widest` is the largest top_k.
    The id that carries the mass over top_p is kept, and so are ids as likely as the last kept
    one, so that the result does not depend on how ties are sorted.
    """
    scores = scores / temperature.clamp(min=1e-6)
    ranked = scores.topk(min(widest, scores.shape[-1]), dim=-1).values
    is_within = torch.arange(ranked.shape[-1], device=scores.device) < top_k
    ranked = ranked.masked_fill(~is_within, float("-inf"))
    mass = ranked.softmax(-1).cumsum(-1)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    kept = (is_within & (before <= top_p)).sum(-1, keepdim=True)
    floor = ranked.gather(-1, kept.clamp(min=1) - 1)
    return scores.masked_fill(scores < floor, float("-inf"))
