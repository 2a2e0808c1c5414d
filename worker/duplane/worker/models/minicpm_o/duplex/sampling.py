"""Chooses the ids of duplex conversations from logits, for many slots in one call.

A sampled conversation uses its uniform numbers in this order. Each text step uses one number to
decide whether the text of the unit ends here (`<|chunk_eos|>`). If it does not end, and
`listen_top_k` has not decided either, the step uses a second number to draw the id. Each step of
the talker uses one number. Source: `StreamDecoder.decode` in `MiniCPMO45/utils.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.duplex.requested_speech import Required
from duplane.worker.models.minicpm_o.llm.sampling import (
    DrawSettings,
    PenalisedIds,
    RecentIds,
    Uniforms,
    choose_ids,
    id_masses,
)
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.transfer import download, upload
from duplane.worker.models.types import ConversationOptions


class Decision(IntEnum):
    """Why an id was chosen."""

    CHUNK_END = 0
    LISTEN_RANK = 1
    CHOICE = 2
    NOT_FINITE = 3


class Choice(NamedTuple):
    """An id that was chosen for one conversation, and why.

    `listen_probability` is the probability, before the draws, that they choose `<|listen|>`. It is
    None unless the conversation's probability was asked for and the id was drawn.
    """

    token: int
    decision: Decision
    listen_probability: float | None = None


@dataclass(frozen=True)
class SlotSampling:
    """The options of one conversation, its uniform numbers, and the ids that it chose last."""

    slot: int
    options: ConversationOptions
    uniforms: Uniforms
    draws: DrawSettings
    recent: RecentIds


class DuplexSampling:
    """Chooses ids for the conversations of all slots."""

    def __init__(
        self, tokens: Tokens, vocabulary: int, slot_count: int, device: torch.device
    ) -> None:
        self._tokens = tokens
        self._device = device
        self._forbidden = torch.tensor(tokens.forbidden, device=device)
        self._penalised = PenalisedIds(slot_count, vocabulary, device)

    @property
    def memory_bytes(self) -> int:
        """The size of the per-slot tensors."""
        return self._penalised.memory_bytes

    def open(self, slot: int, options: ConversationOptions, uniforms: Uniforms) -> SlotSampling:
        """Return the sampling state of a new conversation in a clean slot."""
        draws = DrawSettings(
            is_greedy=options.is_greedy,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p or 2.0,
        )
        recent = RecentIds(options.text_repetition_window_size)
        return SlotSampling(slot, options, uniforms, draws, recent)

    def repeat(self, conversation: SlotSampling, chosen: Sequence[int], draw_count: int) -> None:
        """Let the penalty count earlier choices, and skip the uniform numbers that they used."""
        self._penalised.extend(conversation.slot, chosen, conversation.recent)
        conversation.uniforms.advance(draw_count)

    def reset(self, slot: int) -> None:
        """Empty the slot's set of penalised ids."""
        self._penalised.reset(slot)

    def is_clean(self, slot: int) -> bool:
        """True if no state of a conversation is left in the slot."""
        return self._penalised.is_clean(slot)

    def choose(
        self,
        conversations: Sequence[SlotSampling],
        logits: Tensor,
        begins_unit: Sequence[bool] = (),
        required: Sequence[Required | None] = (),
    ) -> list[Choice]:
        """Choose one id for each conversation from raw logits, float32 `[slots, vocabulary]`.

        `begins_unit` tells for which conversations the probability of listening is reported.
        `required` are ids that must be chosen. They are counted, and uniform numbers are used, as
        if the model had drawn these ids.

        A first draw, from the raw logits at temperature 1, decides whether the text of the unit
        ends (`<|chunk_eos|>`). So penalties do not change the moment at which the model pauses. If
        the text does not end, the id is chosen from the logits with penalties and masks. The host
        waits for the device once per batch. After an exception the call can be repeated.
        """
        ahead = [
            [0.0, 0.0] if each.draws.is_greedy else each.uniforms.peek(2) for each in conversations
        ]
        draws = [each.draws for each in conversations]
        is_reported = [
            begins and not row.is_greedy
            for begins, row in zip(begins_unit or [False] * len(draws), draws, strict=True)
        ]
        scores, is_listen_rank = self._scores(conversations, logits)
        listen = self._tokens.listen if any(is_reported) else None
        chosen, p_listen = choose_ids(scores, draws, [second for _, second in ahead], listen)
        # The host decides by these numbers, because each kernel has a fixed cost.
        columns = {"chosen": chosen, "likeliest": logits.argmax(-1), "sum": logits.sum(-1)}
        if not all(row.is_greedy for row in draws):
            masses = id_masses(logits, self._tokens.chunk_eos)
            columns |= zip(("before", "stop", "total"), masses, strict=True)
        if is_listen_rank is not None:
            columns["is_listen_rank"] = is_listen_rank
        if p_listen is not None:
            columns["p_listen"] = p_listen
        rows: list[list[float]] = download(torch.stack([*columns.values()], -1)).tolist()
        choices = [
            self._decide(
                dict(zip(columns, row, strict=True)),
                None if each.draws.is_greedy else first,
                is_reported=reported,
            )
            for each, row, (first, _), reported in zip(
                conversations, rows, ahead, is_reported, strict=True
            )
        ]
        if any(required):
            pairs = zip(choices, required, strict=True)
            choices = [self._following(choice, wanted) for choice, wanted in pairs]
        self._penalised.push(
            [
                (each.slot, choice.token, each.recent)
                for each, choice in zip(conversations, choices, strict=True)
                if choice.decision is Decision.CHOICE
            ]
        )
        # If `push` raises, no state on the host has changed. The code below does not raise. So
        # `choose` can be called again after an exception.
        for each, choice in zip(conversations, choices, strict=True):
            if not each.draws.is_greedy:
                each.uniforms.advance(2 if choice.decision is Decision.CHOICE else 1)
        return choices

    def _decide(
        self, found: Mapping[str, float], uniform: float | None, *, is_reported: bool
    ) -> Choice:
        """Return the choice by the numbers of one row of logits.

        `uniform` decides whether the text ends; without it, the most likely id does.
        """
        if not isfinite(found["sum"]):
            return Choice(int(found["chosen"]), Decision.NOT_FINITE)
        is_listen_rank = bool(found.get("is_listen_rank"))
        is_end = found["likeliest"] == self._tokens.chunk_eos
        listening = None
        if uniform is not None:
            before, stop, total = found["before"], found["stop"], found["total"]
            is_end = before <= uniform * total < stop
            if is_reported:
                likely = 0.0 if is_listen_rank else found["p_listen"]
                listening = min(max((1 - (stop - before) / total) * likely, 0.0), 1.0)
        if is_end:
            return Choice(self._tokens.chunk_eos, Decision.CHUNK_END, listening)
        if is_listen_rank:
            return Choice(self._tokens.eos, Decision.LISTEN_RANK, listening)
        return Choice(int(found["chosen"]), Decision.CHOICE, listening)

    def _following(self, choice: Choice, required: Required | None) -> Choice:
        """Return the choice, changed so that it follows what is required of its unit."""
        if required is None or choice.decision is Decision.NOT_FINITE:
            return choice
        if required.token == self._tokens.chunk_eos:
            return Choice(required.token, Decision.CHUNK_END)
        if choice.decision is Decision.CHUNK_END and required.may_end:
            return choice
        return Choice(required.token, Decision.CHOICE)

    def _scores(
        self, conversations: Sequence[SlotSampling], logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return penalised scores [slots, vocabulary], and whether `listen_top_k` decides [slots].

        The latter is None if no conversation has this option.

        As in the reference, for which the model was tuned, the repetition penalty divides scores of
        either sign, and the listen options act on the tokenizer's end-of-sequence id, not on
        `<|listen|>`.
        """
        numbers = [
            (
                each.options.text_repetition_penalty,
                each.options.length_penalty,
                each.options.listen_prob_scale,
                each.options.listen_top_k or 0,
            )
            for each in conversations
        ]
        columns = upload(numbers, self._device, torch.float32)
        repetition, length, listen_scale, listen_top_k = columns.unbind(1)
        turn_eos, eos = self._tokens.turn_eos, self._tokens.eos
        is_penalised = self._penalised.rows([each.slot for each in conversations])
        scores = torch.where(is_penalised, logits / repetition[:, None], logits)
        turn = scores[:, turn_eos]
        scores[:, turn_eos] = torch.where(turn > 0, turn / length, turn * length)
        scores[:, eos] *= listen_scale
        scores[:, self._forbidden] = float("-inf")
        if not any(each.options.listen_top_k for each in conversations):
            return scores, None
        rank = (scores > scores[:, eos, None]).sum(-1)
        return scores, rank < listen_top_k
