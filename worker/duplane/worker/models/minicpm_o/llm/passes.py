"""One pass of the LLM for rows of units, of prompts and of chats, whatever their mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.batch_isolation import BatchItem, run_stage
from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from duplane.worker.models.minicpm_o.transfer import upload


class RowSource(BatchItem, Protocol):
    """What has rows in a pass.

    - `pass_rows`: the embeddings [rows, hidden]; None if the row is that of `next_id`.
    - `next_id`: the id to feed, which is read only without `pass_rows`.
    """

    @property
    def pass_rows(self) -> Tensor | None: ...
    @property
    def next_id(self) -> int | None: ...


@dataclass(frozen=True)
class Fed:
    """The result of a pass: the state [slots, hidden] and the logits [slots, ids] of last rows.

    `rows` has the number of the row of each slot. Slots that have failed are not in it.
    """

    rows: dict[int, int]
    hidden: Tensor
    logits: Tensor

    def hidden_of(self, slot: int) -> Tensor:
        """Return the state [hidden] of the slot's last row."""
        return self.hidden[self.rows[slot]]

    def logits_of(self, slots: Sequence[int]) -> Tensor:
        """Return the logits [slots, ids] of some slots, which are ascending."""
        if len(slots) == len(self.rows):
            return self.logits
        return self.logits[upload([self.rows[slot] for slot in slots], self.logits.device)]


def feed(llm: LanguageModel, sources: Sequence[RowSource]) -> Fed | None:
    """Feed the rows of all sources, slots ascending. Returns None if all of them fail."""
    done = run_stage("pass", sources, partial(_feed, llm), cache=llm.cache)
    if not done:
        return None
    hidden, logits = done[0][1]
    if len(done) > 1:
        hidden = torch.cat([states for _, (states, _) in done])
        logits = torch.cat([rows for _, (_, rows) in done])
    slots = [source.slot for some, _ in done for source in some]
    return Fed({slot: row for row, slot in enumerate(slots)}, hidden, logits)


def _feed(llm: LanguageModel, sources: Sequence[RowSource]) -> tuple[Tensor, Tensor]:
    """Feed all rows. Returns the states and logits of the last rows."""
    given = [(source, source.pass_rows) for source in sources]
    ids = [one.next_id for one, rows in given if rows is None and one.next_id is not None]
    counts = [(one.slot, 1 if rows is None else len(rows)) for one, rows in given]
    if len(ids) == len(sources):
        return llm.feed(counts, ids)
    steps = iter(llm.embed(ids)[:, None].unbind() if ids else ())
    embeds = [next(steps) if rows is None else rows for _, rows in given]
    return llm.feed(counts, torch.cat(embeds))
