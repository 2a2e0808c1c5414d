"""The parts that duplex and chat sampling share: uniform numbers, draws, filters, penalised ids.

A draw chooses the first id whose cumulative probability (float64, ids ascending) exceeds a uniform
number. Each slot has its own source of numbers, so its ids do not depend on the other slots.
Source of the filters: `top_k_top_p_filtering` in `MiniCPMO45/utils.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.transfer import upload

TIES = 64
"""Number of ids after the top-k ids that are examined too, because they may be equally likely."""


class Uniforms(Protocol):
    """A conversation's source of uniform numbers in [0, 1). It counts those that were consumed."""

    used_count: int

    def peek(self, count: int) -> list[float]:
        """Return the next `count` numbers, without consuming them."""
        ...

    def advance(self, count: int) -> None:
        """Consume `count` numbers."""
        ...


class SeededUniforms:
    """Uniform numbers of one random generator. Without a seed each run has other numbers."""

    _BLOCK = 64

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._ahead: deque[float] = deque()
        self.used_count = 0

    def peek(self, count: int) -> list[float]:
        while len(self._ahead) < count:
            block = torch.rand(self._BLOCK, generator=self._generator, dtype=torch.float64)
            self._ahead.extend(block.numpy().tolist())
        return [self._ahead[index] for index in range(count)]

    def advance(self, count: int) -> None:
        self.peek(count)
        self.used_count += count
        for _ in range(count):
            self._ahead.popleft()


@dataclass(frozen=True)
class DrawSettings:
    """The settings of one slot's draws. `top_k` 0 and `top_p` above 1 keep every id."""

    is_greedy: bool
    temperature: float
    top_k: int
    top_p: float

    @property
    def is_drawn(self) -> bool:
        """Whether ids are drawn; otherwise the most likely id is chosen."""
        return not self.is_greedy and self.temperature > 0


def choose_ids(
    scores: Tensor,
    settings: Sequence[DrawSettings],
    uniforms: Sequence[float],
    watched: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Choose one id per row of penalised scores, float32 `[rows, ids]`.

    Also returns the probability, float64 [rows], of the id `watched` before the choice, if there is
    such an id. A row that takes the most likely id has the probability 1 or 0.
    """
    likeliest = scores.argmax(-1)
    if not any(row.is_drawn for row in settings):
        return likeliest, None if watched is None else (likeliest == watched).double()
    count = scores.shape[-1]
    widest = max(min(row.top_k or count, count) for row in settings if row.is_drawn)
    rows = [
        (uniform, row.is_drawn, max(row.temperature, 1e-6), row.top_k or count, row.top_p)
        for row, uniform in zip(settings, uniforms, strict=True)
    ]
    numbers = upload(rows, scores.device, torch.float64)
    temperature, top_k, top_p = numbers[:, 2:].float().unsqueeze(-1).unbind(1)
    ranked, ids = scores.topk(min(widest + TIES, count), dim=-1)
    ranked = ranked / temperature
    floor = lowest_kept(ranked[:, :widest], top_k, top_p)
    if widest + TIES < count:
        ids, order = ids.sort(-1)
        scores = ranked.gather(-1, order)
    else:
        ids, scores = torch.arange(count, device=ids.device).expand_as(ids), scores / temperature
    probabilities = scores.masked_fill(scores < floor, float("-inf")).softmax(-1)
    drawn = ids.gather(-1, draw(probabilities, numbers[:, 0]).unsqueeze(-1)).squeeze(-1)
    is_drawn = numbers[:, 1] > 0
    probability = None
    if watched is not None:
        probability = (probabilities * (ids == watched)).sum(-1, dtype=torch.float64)
        if not all(row.is_drawn for row in settings):
            probability = torch.where(is_drawn, probability, (likeliest == watched).double())
    return torch.where(is_drawn, drawn, likeliest), probability


def id_masses(logits: Tensor, token: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return where `token` lies in the cumulative probabilities of raw logits `[rows, ids]`.

    The sums are float64 [rows]: of the ids before `token`, of these and `token`, and of all ids.
    This needs no cumulative sums over all ids.
    """
    probabilities = logits.softmax(-1)
    before = probabilities[:, :token].sum(-1, dtype=torch.float64)
    stop = before + probabilities[:, token]
    return before, stop, stop + probabilities[:, token + 1 :].sum(-1, dtype=torch.float64)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one id per row of `[rows, ids]`; `uniforms` [rows] are float64. Returns [rows]."""
    cumulative = probabilities.double().cumsum(-1)
    thresholds = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    drawn = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    return drawn.clamp(max=probabilities.shape[-1] - 1)


def lowest_kept(ranked: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest score [rows, 1] of the top-k ids and, among these, the top-p ids.

    `ranked` are the highest scores [rows, n] in descending order, `top_k` and `top_p` [rows, 1].
    The id at which the sum of probabilities exceeds top_p is kept. Ids that are as likely as the
    last kept id are to be kept too, so that the result does not depend on the order of equal
    scores.
    """
    is_within = torch.arange(ranked.shape[-1], device=ranked.device) < top_k
    mass = ranked.masked_fill(~is_within, float("-inf")).softmax(-1).cumsum(-1)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    kept = (is_within & (before <= top_p)).sum(-1, keepdim=True)
    return ranked.gather(-1, kept.clamp(min=1) - 1)


class RecentIds:
    """The last `size` chosen ids of one conversation, oldest first, and how often each occurs."""

    def __init__(self, size: int) -> None:
        self.size, self.ids, self.counts = size, deque[int](maxlen=size), Counter[int]()


class PenalisedIds:
    """For each slot the set of ids that the repetition penalty applies to, on the device."""

    def __init__(self, slot_count: int, vocabulary: int, device: torch.device) -> None:
        self._table = torch.zeros(slot_count, vocabulary, dtype=torch.bool, device=device)

    @property
    def memory_bytes(self) -> int:
        """The size of the table."""
        return self._table.nbytes

    def rows(self, slots: Sequence[int]) -> Tensor:
        """Return whether each id is penalised: bool [slots, vocabulary]."""
        return self._table[upload(slots, self._table.device)]

    def update(self, changes: Sequence[tuple[int, int, bool]]) -> None:
        """Apply changes: `(slot, id, whether the id is now penalised)`."""
        if changes:
            slots, ids, values = upload(changes, self._table.device, torch.long).unbind(1)
            self._table[slots, ids] = values.bool()

    def push(self, chosen: Sequence[tuple[int, int, RecentIds]]) -> None:
        """Add the id of each `(slot, id, recent ids)` to the recent ids; keep the last `size`.

        Afterwards the slot's set of penalised ids has exactly these recent ids. If this call
        raises, nothing has changed on the host, so the call can be repeated.
        """
        chosen = [entry for entry in chosen if entry[2].size]
        changes = [(slot, token, True) for slot, token, _ in chosen]
        for slot, token, recent in chosen:
            oldest = recent.ids[0] if len(recent.ids) == recent.size else token
            if oldest != token and recent.counts[oldest] == 1:
                changes.append((slot, oldest, False))
        self.update(changes)
        for _, token, recent in chosen:
            if len(recent.ids) == recent.size:
                oldest = recent.ids.popleft()
                recent.counts[oldest] -= 1
                if not recent.counts[oldest]:
                    del recent.counts[oldest]
            recent.ids.append(token)
            recent.counts[token] += 1

    def extend(self, slot: int, chosen: Sequence[int], recent: RecentIds) -> None:
        """Add ids that the slot's conversation chose before, oldest first."""
        recent.ids.extend(chosen)
        recent.counts = Counter(recent.ids)
        self.reset(slot)
        self.update([(slot, token, True) for token in recent.counts])

    def reset(self, slot: int) -> None:
        """Remove all ids of a slot."""
        self._table[slot].zero_()

    def is_clean(self, slot: int) -> bool:
        """True if the slot has no ids."""
        return not bool(self._table[slot].any().item())
