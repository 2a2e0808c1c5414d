"""Chooses the ids of chat answers from logits, for many slots in one call.

Each drawn id consumes one uniform number. Source: class `ChunkPrefillChunkGenerate` of
`MiniCPMO45/utils.py` in OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duplane.worker.models.chat import ChatOptions
from duplane.worker.models.minicpm_o.llm.sampling import (
    DrawSettings,
    PenalisedIds,
    Uniforms,
    choose_ids,
)
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.transfer import download, upload

PENALTY_WINDOW = 128
TERMINATORS = ("<|tts_eos|>", "<|im_end|>", "</s>")
UNSPEAKABLE = tuple(":：；#“”‘’@*【】「」()（）[]&/$")
"""Characters that a spoken answer must not contain, in addition to `bad_token_ids`."""
NOT_FINITE = -1


class ChatSampling:
    """Chooses ids for the chats of all slots."""

    def __init__(
        self, tokens: Tokens, vocabulary: int, slot_count: int, device: torch.device
    ) -> None:
        self.terminators = tuple(dict.fromkeys(map(tokens.id_or_unknown, TERMINATORS)))
        unspeakable = {*map(tokens.id_or_unknown, UNSPEAKABLE), *tokens.bad_ids}
        self._unspeakable = torch.tensor(sorted(unspeakable), device=device)
        self._ends = torch.tensor(self.terminators, device=device)
        self._device = device
        self._penalised = PenalisedIds(slot_count, vocabulary, device)
        self._recent: list[set[int]] = [set() for _ in range(slot_count)]
        self._options: list[ChatOptions | None] = [None] * slot_count

    @property
    def memory_bytes(self) -> int:
        """The size of the per-slot tensors."""
        return self._penalised.memory_bytes

    def open(self, slot: int, options: ChatOptions) -> None:
        """Set the sampling options of a new chat."""
        self._options[slot] = options

    def reset(self, slot: int) -> None:
        """Forget the slot's chat."""
        self._penalised.reset(slot)
        self._recent[slot] = set()
        self._options[slot] = None

    def is_clean(self, slot: int) -> bool:
        """True if no state of a chat is left in the slot."""
        if self._recent[slot] or self._options[slot] is not None:
            return False
        return self._penalised.is_clean(slot)

    def begin_chunk(self, slot: int, answer: Sequence[int]) -> None:
        """Apply the repetition penalty to the last ids of the answer, and to ids chosen later."""
        recent = set(answer[-PENALTY_WINDOW:])
        self._penalised.update([(slot, token, False) for token in self._recent[slot] - recent])
        self._recent[slot] = recent

    def choose(
        self, slots: Sequence[int], logits: Tensor, uniforms: Sequence[Uniforms]
    ) -> list[int]:
        """Choose one id per slot from raw logits, float32 `[slots, vocabulary]`.

        Returns `NOT_FINITE` for a slot whose logits are not finite. The host waits for the device
        once per batch. After an exception the call can be repeated.
        """
        options = [self._of(slot) for slot in slots]
        draws = [
            DrawSettings(o.is_greedy, o.temperature, o.top_k, o.top_p if o.top_p < 1 else 2.0)
            for o in options
        ]
        ahead = [
            source.peek(1)[0] if row.is_drawn else 0.0
            for row, source in zip(draws, uniforms, strict=True)
        ]
        chosen, _ = choose_ids(self._scores(slots, options, logits), draws, ahead)
        chosen = torch.where(logits.sum(-1).isfinite(), chosen, NOT_FINITE)
        ids: list[int] = download(chosen).tolist()
        new = [
            (slot, token)
            for slot, token in zip(slots, ids, strict=True)
            if token != NOT_FINITE and token not in self.terminators
        ]
        for slot, token in new:
            self._recent[slot].add(token)
        self._penalised.update([(slot, token, True) for slot, token in new])
        for row, source in zip(draws, uniforms, strict=True):
            source.advance(int(row.is_drawn))
        return ids

    def _of(self, slot: int) -> ChatOptions:
        options = self._options[slot]
        if options is None:
            raise ValueError(f"slot {slot} has no chat")
        return options

    def _scores(
        self, slots: Sequence[int], options: Sequence[ChatOptions], logits: Tensor
    ) -> Tensor:
        """Compute scores that exclude unspeakable ids and penalise recent ids and terminators."""
        numbers = [(o.repetition_penalty, o.length_penalty, o.generate_audio) for o in options]
        columns = upload(numbers, self._device, torch.float32).unsqueeze(-1)
        repetition, length, is_spoken = columns.unbind(1)
        scores = logits.clone()
        forbidden = scores[:, self._unspeakable]
        silent = torch.full_like(forbidden, float("-inf"))
        scores[:, self._unspeakable] = torch.where(is_spoken > 0, silent, forbidden)
        scores = torch.where(self._penalised.rows(slots), _scaled(scores, repetition), scores)
        scores[:, self._ends] = _scaled(scores[:, self._ends], length)
        return scores


def _scaled(scores: Tensor, penalty: Tensor) -> Tensor:
    """Lower scores by the factor `penalty`, whatever their sign."""
    return torch.where(scores > 0, scores / penalty, scores * penalty)
