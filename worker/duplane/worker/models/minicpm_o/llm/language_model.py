"""The LLM: token embeddings, decoder and head, for the packed rows [rows, hidden] of many slots.

Source: Qwen3 (https://arxiv.org/abs/2505.09388). Parameter names are those under the checkpoint's
prefix `llm.`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o.checkpoint import Checkpoint, field
from duplane.worker.models.minicpm_o.layers import embedding, linear
from duplane.worker.models.minicpm_o.llm.cuda_graphs import (
    StaticRows,
    StepGraphs,
    trial_lengths,
)
from duplane.worker.models.minicpm_o.llm.decoder import Decoder, DecoderConfig
from duplane.worker.models.minicpm_o.llm.kv_cache import Slide
from duplane.worker.models.minicpm_o.proof import FIRST_ROWS, relative_error
from duplane.worker.models.minicpm_o.transfer import upload

PREFIX = "llm."
PREFILL_ROWS = 512
"""Maximum number of rows of one slot that are fed in one pass; a long prompt needs several
passes."""


class _Body(Decoder):
    """The decoder and the embedding table, which have a common prefix in the checkpoint."""

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


class DecodeStep:
    """A step with one row for each of up to `width` slots.

    It reads `embeds` [width, hidden] and writes `hidden` [width, hidden] and `logits` [width, ids].
    The first rows are those of the slots.
    """

    def __init__(self, llm: LanguageModel, width: int) -> None:
        self._llm = llm
        self.rows = StaticRows(llm.cache, width)
        table = llm.model.embed_tokens.weight
        self.embeds = torch.zeros(width, llm.hidden_size, dtype=table.dtype, device=table.device)
        self.hidden = torch.zeros_like(self.embeds)
        self.logits = torch.zeros(width, llm.vocabulary, device=table.device)

    def begin(self, slots: Sequence[int], positions: Sequence[int], embeds: Tensor) -> None:
        """Set the slots, the positions of their rows and their embeddings [slots, hidden]."""
        self.rows.begin(slots, positions)
        self.embeds[: len(slots)] = embeds

    def run(self) -> None:
        """Run the step. It never waits for the device, so that a CUDA graph can capture it."""
        self.hidden.copy_(self._llm.model(self.embeds, self.rows.rows()))
        self.logits.copy_(self._llm.logits(self.hidden))


class LanguageModel(nn.Module):
    """Qwen3 with its cache. It maps rows of embeddings to hidden states and logits."""

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
        self.graphs: StepGraphs[DecodeStep] | None = None
        self.is_tied = field(config, "tie_word_embeddings", bool, False)
        if not self.is_tied:
            self.lm_head = linear(
                dims.hidden_size, self.vocabulary, bias=False, device=device, dtype=dtype
            )

    def load(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Fill the weights; return the names of the LLM's tensors that are not used."""
        return checkpoint.load_into(self, PREFIX)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Return the embeddings `[ids, hidden]`."""
        table = self.model.embed_tokens
        return table(upload(ids, table.weight.device, torch.long))

    def feed(self, counts: Sequence[tuple[int, int]], embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Add packed embeddings `[rows, hidden]` to contexts. `counts` are `(slot, rows)`.

        The slots must be ascending. Returns the normed hidden state `[slots, hidden]` of the last
        row of each slot and its logits, float32 `[slots, vocabulary]`.
        """
        if self.graphs is not None and all(rows == 1 for _, rows in counts):
            found = self.graphs.find(len(counts))
            if found is not None:
                return self._replay(*found, [slot for slot, _ in counts], embeds)
        rows = self.cache.extend(counts)
        hidden = self.model(embeds, rows)[rows.last]
        return hidden, self.logits(hidden)

    def _replay(
        self, step: DecodeStep, run: Callable[[], None], slots: Sequence[int], embeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Feed one row for each slot through a step of fixed size. Returns what `feed` returns."""
        positions = [self.cache.length(slot) for slot in slots]
        self.cache.grow([(slot, 1) for slot in slots])
        step.begin(slots, positions, embeds)
        run()
        count = len(slots)
        return step.hidden[:count].clone(), step.logits[:count].clone()

    def capture(self, *, is_replayed: bool = True) -> None:
        """Capture steps of one row as CUDA graphs; `feed` uses them from then on."""
        graphs = StepGraphs[DecodeStep](self.cache, "LLM")
        graphs.capture(partial(DecodeStep, self), self._check, is_replayed=is_replayed)
        self.graphs = graphs

    def _check(self, step: DecodeStep, run: Callable[[], None], width: int) -> float:
        """Compare a step with the plain path, in one long context and in short ones."""
        slots, lengths = range(width), trial_lengths(self.cache, width)
        ids = [row % self.vocabulary for row in range(FIRST_ROWS * width)]
        self.append([(slot, FIRST_ROWS) for slot in slots], self.embed(ids))
        self.cache.grow([(slot, lengths[slot] - FIRST_ROWS) for slot in slots])
        embeds = self.embed([slot % self.vocabulary for slot in slots])
        hidden, logits = self.feed([(slot, 1) for slot in slots], embeds)
        for slot in slots:
            self.cache.rewind(slot, lengths[slot])
        got = self._replay(step, run, slots, embeds)
        return relative_error([(got[0], hidden), (got[1], logits)])

    def append(self, counts: Sequence[tuple[int, int]], embeds: Tensor) -> Tensor:
        """Add rows to contexts like `feed`; return the hidden state of each row, without logits."""
        return self.model(embeds, self.cache.extend(counts))

    def splice(self, slot: int, slide: Slide) -> None:
        """Change the slot's context as a window requires: move rows, then feed ids before them.

        The keys of moved rows are rotated to their new positions. The fed ids attend only to the
        rows before them.
        """
        self.model.move(slot, slide.kept, slide.target)
        length = self.cache.length(slot)
        if slide.ids:
            self.cache.truncate(slot, slide.start)
            self.append_long(slot, self.embed(slide.ids))
            self.cache.restore(slot, length)

    def append_long(self, slot: int, embeds: Tensor) -> list[Tensor]:
        """Append any number of rows `[rows, hidden]` to one slot, in passes of bounded size.

        Returns the hidden states of each pass.
        """
        starts = range(0, len(embeds), PREFILL_ROWS)
        parts = [embeds[start : start + PREFILL_ROWS] for start in starts]
        return [self.append([(slot, len(rows))], rows) for rows in parts]

    def feed_units(self, slots: Sequence[int], embeds: Sequence[Tensor]) -> Tensor:
        """Feed the rows `[n, hidden]` of each slot, slots ascending; return each last row's logits.

        The last `PREFILL_ROWS` rows of every slot are fed in one pass for all slots. Earlier rows
        are fed before, slot by slot.
        """
        for slot, rows in zip(slots, embeds, strict=True):
            self.append_long(slot, rows[:-PREFILL_ROWS])
        last = [rows[-PREFILL_ROWS:] for rows in embeds]
        counts = [(slot, len(rows)) for slot, rows in zip(slots, last, strict=True)]
        return self.feed(counts, torch.cat(last))[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits `[rows, vocabulary]` of hidden states `[rows, hidden]`."""
        if self.is_tied:
            return nn.functional.linear(hidden, self.model.embed_tokens.weight).float()
        return self.lm_head(hidden).float()
