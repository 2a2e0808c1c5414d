"""The LLM: token embeddings, decoder and head, for the packed rows [rows, hidden] of many slots.

Source: Qwen3 (https://arxiv.org/abs/2505.09388). Parameter names are those under the checkpoint's
prefix `llm.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o.checkpoint import Checkpoint, field
from duplane.worker.models.minicpm_o.layers import Product, linear
from duplane.worker.models.minicpm_o.llm.attention import Rows
from duplane.worker.models.minicpm_o.llm.cuda_graphs import PassForm, PassGraphs, StaticPass
from duplane.worker.models.minicpm_o.llm.decoder import Decoder, DecoderConfig
from duplane.worker.models.minicpm_o.llm.kv_cache import Slide
from duplane.worker.models.minicpm_o.proof import relative_error
from duplane.worker.models.minicpm_o.transfer import refill, upload

PREFIX = "llm."
PREFILL_ROWS = 512
"""Maximum number of rows of one slot that are fed in one pass; a long prompt needs several
passes."""
PASS_ROWS = (4, 32, 128, PREFILL_ROWS)
"""The sizes of passes on a GPU. Attention has a program for each tile of a size, so few rows, which
are most passes, have a small one."""
PASS_SLOTS = 64
"""Maximum number of slots of a pass on a GPU."""


class Pass(StaticPass):
    """A pass of up to `rows` packed rows of any slots.

    `states` [rows, hidden] are the normed states of all rows; `hidden` [slots, hidden] and `logits`
    [slots, ids], float32, are those of the last row of each slot.
    """

    states: Tensor
    hidden: Tensor
    logits: Tensor

    def __init__(self, llm: LanguageModel, rows: int) -> None:
        self._llm, table = llm, llm.model.embed_tokens.weight
        form = PassForm(llm.cache, rows, min(rows, PASS_SLOTS, llm.cache.slot_count))
        numbers = torch.zeros(form.count + rows, dtype=torch.long, device=table.device)
        self._embeds = table.new_zeros(rows, table.shape[1])
        super().__init__(form, numbers, self._feed)
        self.stage()

    def stage(
        self,
        counts: Sequence[tuple[int, int]] = (),
        starts: Sequence[int] = (),
        inputs: Tensor | Sequence[int] = (),
    ) -> None:
        """Set the `(slot, rows)`, their first positions, and their embeddings or ids."""
        ids = np.full(self.form.rows, -1)
        if isinstance(inputs, Tensor):
            self._embeds[: len(inputs)] = inputs
        else:
            ids[: len(inputs)] = inputs
        refill(self.numbers, np.concatenate((self.form.numbers(counts, starts), ids)))

    def _feed(self, rows: Rows) -> None:
        ids = self.numbers[self.form.count :]
        known = self._llm.model.embed_tokens(ids.clamp(min=0))
        embeds = torch.where((ids < 0).unsqueeze(-1), self._embeds, known)
        self.states = self._llm.model(embeds, rows)
        self.hidden = self.states[rows.last]
        self.logits = self._llm.logits(self.hidden)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def split_rows(
    counts: Iterable[tuple[int, int]], most_rows: int, most_slots: int
) -> list[list[tuple[int, int]]]:
    """Split packed rows, `(slot, rows)`, into passes of bounded size, in their order."""
    passes: list[list[tuple[int, int]]] = []
    room = 0
    for slot, count in counts:
        left = count
        while left:
            if not room or len(passes[-1]) == most_slots:
                passes.append([])
                room = most_rows
            fed = min(left, room)
            passes[-1].append((slot, fed))
            left, room = left - fed, room - fed
    return passes


class LanguageModel(nn.Module):
    """Qwen3 with its cache. It maps rows of embeddings to hidden states and logits."""

    def __init__(
        self,
        config: Mapping[str, Any],
        slot_count: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        share: float = 1.0,
    ) -> None:
        super().__init__()
        dims = DecoderConfig.from_json(config, has_head_norm=True)
        self.vocabulary = field(config, "vocab_size", int)
        self.hidden_size = dims.hidden_size
        self.model = Decoder(dims, slot_count, capacity, device, dtype, share, self.vocabulary)
        self.cache = self.model.cache
        self.graphs = PassGraphs[Pass](self.cache, "LLM")
        self.is_tied = field(config, "tie_word_embeddings", bool, False)
        if not self.is_tied:
            self.lm_head = linear(
                dims.hidden_size, self.vocabulary, bias=False, device=device, dtype=dtype
            )
            self._head = Product(self.lm_head)

    def load(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Fill the weights; return the names of the LLM's tensors that are not used."""
        return checkpoint.load_into(self, PREFIX)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Return the embeddings `[ids, hidden]`."""
        table = self.model.embed_tokens
        return table(upload(ids, table.weight.device, torch.long))

    def feed(
        self, counts: Sequence[tuple[int, int]], inputs: Tensor | Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Add packed rows, embeddings `[rows, hidden]` or ids, to contexts.

        `counts` are `(slot, rows)`; the slots must be ascending. Returns the normed hidden state
        `[slots, hidden]` of the last row of each slot and its logits, float32 `[slots, ids]`.
        """
        if not self._has_pass(counts):
            rows = self.cache.extend(counts)
            hidden = self.model(self._embedded(inputs), rows)[rows.last]
            return hidden, self.logits(hidden)
        # The next launch overwrites the results of a pass.
        found = [
            (done.hidden[:ended].clone(), done.logits[:ended].clone())
            for done, _, ended in self._launch(counts, inputs)
        ]
        hidden, logits = zip(*found, strict=True)
        return _joined(hidden), _joined(logits)

    def append(self, counts: Sequence[tuple[int, int]], inputs: Tensor | Sequence[int]) -> Tensor:
        """Add rows to contexts like `feed`; return the hidden state of each row, without logits."""
        if not self._has_pass(counts):
            return self.model(self._embedded(inputs), self.cache.extend(counts))
        launches = self._launch(counts, inputs)
        return _joined([done.states[:rows].clone() for done, rows, _ in launches])

    def _embedded(self, inputs: Tensor | Sequence[int]) -> Tensor:
        return inputs if isinstance(inputs, Tensor) else self.embed(inputs)

    def _has_pass(self, counts: Sequence[tuple[int, int]]) -> bool:
        """Whether there are passes of a fixed size for these rows."""
        rows = min(sum(count for _, count in counts), PASS_ROWS[-1])
        return self.graphs.find(rows) is not None

    def _launch(
        self, counts: Sequence[tuple[int, int]], inputs: Tensor | Sequence[int]
    ) -> Iterator[tuple[Pass, int, int]]:
        """Feed rows in passes of fixed sizes.

        Yields each pass when it is launched, its number of rows, and how many of its slots get no
        further rows in a later pass.
        """
        starts = {slot: self.cache.length(slot) for slot, _ in counts}
        self.cache.grow(counts)
        parts, first = split_rows(counts, PASS_ROWS[-1], PASS_SLOTS), 0
        for part, following in zip_longest(parts, parts[1:]):
            rows = sum(count for _, count in part)
            one = self.graphs.find(rows)
            assert one is not None
            one.stage(part, [starts[slot] for slot, _ in part], inputs[first : first + rows])
            one.launch()
            is_cut = following is not None and following[0][0] == part[-1][0]
            yield one, rows, len(part) - is_cut
            starts |= {slot: starts[slot] + count for slot, count in part}
            first += rows

    def capture(self, *, is_replayed: bool = True) -> None:
        """Capture passes as CUDA graphs; `feed` and `append` use them from then on."""
        self.graphs.capture(PASS_ROWS, partial(Pass, self), self._check, is_replayed=is_replayed)

    def _check(self, one: Pass) -> float:
        """Compare a pass with the plain path, in one long context and in short ones."""
        slots, capacity = one.form.slots, self.cache.capacity
        own = max(1, min(one.form.rows // slots, capacity - 1))
        counts, starts = [(slot, own) for slot in range(slots)], [capacity - own] + [0] * slots
        ids = [row % self.vocabulary for row in range(own * slots)]
        self.cache.grow([(0, starts[0])])
        rows = self.cache.extend(counts)
        states = self.model(self.embed(ids), rows)
        one.stage(counts, starts[:slots], ids)
        one.launch()
        hidden = states[rows.last]
        pairs = (one.states[: len(ids)], states), (one.logits[:slots], self.logits(hidden))
        return relative_error([*pairs, (one.hidden[:slots], hidden)])

    def splice(self, slot: int, slide: Slide) -> None:
        """Change the slot's context as a window requires: move rows, then feed ids before them.

        The keys of moved rows are rotated to their new positions. The fed ids attend only to the
        rows before them.
        """
        self.model.move(slot, slide.kept, slide.target)
        length = self.cache.length(slot)
        if slide.ids:
            self.cache.truncate(slot, slide.start)
            self.append_long(slot, slide.ids)
            self.cache.rewind(slot, length)

    def append_long(self, slot: int, inputs: Tensor | Sequence[int]) -> list[Tensor]:
        """Append any number of rows, as those of `feed`, to one slot in passes of bounded size.

        Returns the hidden states of each pass.
        """
        starts = range(0, len(inputs), PREFILL_ROWS)
        parts = [inputs[start : start + PREFILL_ROWS] for start in starts]
        return [self.append([(slot, len(rows))], rows) for rows in parts]

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits `[rows, vocabulary]` of hidden states `[rows, hidden]`."""
        if self.is_tied:
            return nn.functional.linear(hidden, self.model.embed_tokens.weight).float()
        return self._head(hidden).float()
