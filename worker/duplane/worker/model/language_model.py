"""The LLM: token embeddings, decoder and head, fed with packed rows of many slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duplane.worker.model.checkpoint import Checkpoint, field
from duplane.worker.model.decoder import Decoder, DecoderConfig, embedding, linear
from duplane.worker.model.windows import Slide

PREFIX = "llm."
PREFILL_ROWS = 512
"""Rows of one slot that are fed at once; a long prompt takes several passes."""


class _Body(Decoder):
    """The decoder with its embedding table, as the checkpoint nests them."""

    def __init__(
        self,
        config: DecoderConfig,
        vocabulary: int,
        slot_count: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config, slot_count, capacity, device, dtype)
        self.embed_tokens = embedding(vocabulary, config.hidden_size, device=device, dtype=dtype)


class LanguageModel(nn.Module):
    """Qwen3 with a slotted cache. Rows in, hidden states out; logits where they are wanted."""

    def __init__(
        self,
        config: Mapping[str, Any],
        slot_count: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        dims = DecoderConfig.from_json(config, has_head_norm=True, rope_theta=10_000.0)
        self.vocabulary = field(config, "vocab_size", int)
        self.hidden_size = dims.hidden_size
        self.model = _Body(dims, self.vocabulary, slot_count, capacity, device, dtype)
        self.cache = self.model.cache
        self.is_tied = field(config, "tie_word_embeddings", bool, False)
        if not self.is_tied:
            self.lm_head = linear(
                dims.hidden_size, self.vocabulary, bias=False, device=device, dtype=dtype
            )

    def load(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Fill the weights; returns the tensors of the LLM that have no place in it."""
        return checkpoint.load_into(self, PREFIX)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Embeddings `[ids, hidden]`."""
        table = self.model.embed_tokens
        return table(torch.tensor(ids, dtype=torch.long).to(table.weight.device, non_blocking=True))

    def feed(self, counts: Sequence[tuple[int, int]], embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Add packed embeddings `[rows, hidden]` to the context of `(slot, rows)`, ascending.

        Returns the normed hidden state `[slots, hidden]` of each slot's last row and its logits,
        float32 `[slots, vocabulary]`.
        """
        rows = self.cache.extend(counts)
        hidden = self.model(embeds, rows)[rows.last]
        return hidden, self.logits(hidden)

    def append(self, counts: Sequence[tuple[int, int]], embeds: Tensor) -> None:
        """`feed` for rows whose result nobody needs."""
        self.model(embeds, self.cache.extend(counts))

    def splice(self, slot: int, slide: Slide) -> None:
        """Change the slot's context as a window says: rows move, the ids between are fed.

        Rows moved are as if they had always been at their place, ids fed see what is before them.
        """
        self.model.move(slot, slide.kept, slide.target)
        length = self.cache.length(slot)
        if slide.ids:
            self.cache.truncate(slot, slide.start)
            self.append_long(slot, self.embed(slide.ids))
            self.cache.restore(slot, length)

    def append_long(self, slot: int, embeds: Tensor) -> None:
        """`append` for any number of rows `[rows, hidden]`, a bounded number at a time."""
        for start in range(0, len(embeds), PREFILL_ROWS):
            rows = embeds[start : start + PREFILL_ROWS]
            self.append([(slot, len(rows))], rows)

    def feed_units(self, slots: Sequence[int], embeds: Sequence[Tensor]) -> Tensor:
        """Feed each slot, ascending, its rows `[n, hidden]`; the logits behind the last of each.

        One pass for all slots, after passes for what is more than a slot's share of it.
        """
        for slot, rows in zip(slots, embeds, strict=True):
            self.append_long(slot, rows[:-PREFILL_ROWS])
        last = [rows[-PREFILL_ROWS:] for rows in embeds]
        counts = [(slot, len(rows)) for slot, rows in zip(slots, last, strict=True)]
        return self.feed(counts, torch.cat(last))[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]` of hidden states `[rows, hidden]`, in float32."""
        if self.is_tied:
            return nn.functional.linear(hidden, self.model.embed_tokens.weight).float()
        return self.lm_head(hidden).float()
