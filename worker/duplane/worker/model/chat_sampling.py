"""Choosing the ids of chat answers from logits, for many slots at once.

One uniform per drawn id. Each slot has its own settings, set of recent ids and draws, so nothing
depends on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from duplane.worker.model.chat_types import ChatOptions
from duplane.worker.model.sampling import Uniforms, draw, filter_scores
from duplane.worker.model.tokens import Tokens
from duplane.worker.model.transfer import download, upload

PENALTY_WINDOW = 128
TERMINATORS = ("<|tts_eos|>", "<|im_end|>", "</s>")
UNSPEAKABLE = tuple(":：；#“”‘’@*【】「」()（）[]&/$")
"""What a voice cannot read out, beside the checkpoint's own `bad_token_ids`."""
NOT_FINITE = -1


class ChatSampling:
    """The sampling settings and the recent ids of all slots, on the device."""

    def __init__(
        self, tokens: Tokens, vocabulary: int, slot_count: int, device: torch.device
    ) -> None:
        self.terminators = tuple(dict.fromkeys(map(tokens.id_or_unknown, TERMINATORS)))
        unspeakable = {*map(tokens.id_or_unknown, UNSPEAKABLE), *tokens.bad_ids}
        self._unspeakable = torch.tensor(sorted(unspeakable), device=device)
        self._ends = torch.tensor(self.terminators, device=device)
        self._device, self._vocabulary = device, vocabulary
        self._numbers = torch.zeros(slot_count, len(fields(_Row)), device=device)
        self._seen = torch.zeros(slot_count, vocabulary, dtype=torch.bool, device=device)
        self._recent: list[set[int]] = [set() for _ in range(slot_count)]
        self._options: list[ChatOptions | None] = [None] * slot_count

    @property
    def memory_bytes(self) -> int:
        """The size of the per-slot tensors."""
        return self._numbers.nbytes + self._seen.nbytes

    def open(self, slot: int, options: ChatOptions) -> None:
        """Take the settings of a chat."""
        numbers = _numbers(options, self._vocabulary)
        self._numbers[slot] = upload(numbers, self._device)
        self._options[slot] = options

    def reset(self, slot: int) -> None:
        """Forget the chat."""
        self._seen[slot].zero_()
        self._numbers[slot].zero_()
        self._recent[slot] = set()
        self._options[slot] = None

    def is_clean(self, slot: int) -> bool:
        """Verify that nothing of a chat is left."""
        if self._recent[slot] or self._options[slot] is not None:
            return False
        dirty = self._seen[slot].any() | self._numbers[slot].any()
        return not bool(dirty.item())

    def begin_chunk(self, slot: int, answer: Sequence[int]) -> None:
        """Let the repetition penalty see the last ids of the answer so far, and all that follow."""
        recent = set(answer[-PENALTY_WINDOW:])
        gone = upload(sorted(self._recent[slot] - recent), self._device, torch.long)
        self._seen[slot, gone] = False
        self._recent[slot] = recent

    def choose(
        self, slots: Sequence[int], logits: Tensor, uniforms: Sequence[Uniforms]
    ) -> list[int]:
        """One id per slot from raw logits, float32 `[slots, vocabulary]`.

        `NOT_FINITE` where the logits are not. One transfer to the host for the whole batch.
        """
        options = [self._of(slot) for slot in slots]
        index = upload(slots, self._device)
        row = _Row(*self._numbers[index].unsqueeze(-1).unbind(1))
        scores = self._penalised(logits, self._seen[index], row)
        chosen = scores.argmax(-1)
        is_drawn = [not (o.is_greedy or o.temperature == 0) for o in options]
        if any(is_drawn):
            ahead = [
                source.peek(1)[0] if drawn else 0.0
                for drawn, source in zip(is_drawn, uniforms, strict=True)
            ]
            widest = max(
                min(o.top_k or self._vocabulary, self._vocabulary)
                for o, drawn in zip(options, is_drawn, strict=True)
                if drawn
            )
            numbers = upload(ahead, self._device, torch.float64)
            filtered = filter_scores(scores, row.temperature, row.top_k, row.top_p, widest)
            drawn_ids = draw(filtered.softmax(-1), numbers)
            chosen = torch.where(upload(is_drawn, self._device), drawn_ids, chosen)
        chosen = torch.where(logits.isfinite().all(-1), chosen, NOT_FINITE)
        ids: list[int] = download(chosen).tolist()
        for drawn, source in zip(is_drawn, uniforms, strict=True):
            source.advance(int(drawn))
        self._remember(slots, ids)
        return ids

    def _of(self, slot: int) -> ChatOptions:
        options = self._options[slot]
        if options is None:
            raise ValueError(f"slot {slot} has no chat")
        return options

    def _penalised(self, logits: Tensor, seen: Tensor, row: _Row) -> Tensor:
        """Forbid what cannot be spoken, push down what was said, hold back the end."""
        scores = logits.clone()
        forbidden = scores[:, self._unspeakable]
        silent = torch.full_like(forbidden, float("-inf"))
        scores[:, self._unspeakable] = torch.where(row.is_spoken > 0, silent, forbidden)
        scores = torch.where(seen, _scaled(scores, row.repetition_penalty), scores)
        scores[:, self._ends] = _scaled(scores[:, self._ends], row.length_penalty)
        return scores

    def _remember(self, slots: Sequence[int], ids: Sequence[int]) -> None:
        new = [
            (slot, token)
            for slot, token in zip(slots, ids, strict=True)
            if token != NOT_FINITE and token not in self.terminators
        ]
        for slot, token in new:
            self._recent[slot].add(token)
        if new:
            where = upload(new, self._device)
            self._seen[where[:, 0], where[:, 1]] = True


@dataclass(frozen=True)
class _Row:
    """The settings of a batch as columns `[slots, 1]`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    repetition_penalty: Tensor
    length_penalty: Tensor
    is_spoken: Tensor


def _numbers(options: ChatOptions, vocabulary: int) -> list[float]:
    """The fields of `_Row` for one slot; what is off gets a value that changes nothing."""
    return [
        options.temperature,
        min(options.top_k or vocabulary, vocabulary),
        options.top_p if options.top_p < 1 else 2.0,
        options.repetition_penalty,
        options.length_penalty,
        float(options.generate_audio),
    ]


def _scaled(scores: Tensor, penalty: Tensor) -> Tensor:
    """Make scores less likely by `penalty`, whatever their sign."""
    return torch.where(scores > 0, scores / penalty, scores * penalty)
