"""Speech of chat answers, passage by passage: each chunk of text becomes one passage.

A passage lasts until the talker ends it. A call of `advance` draws a bounded number of tokens, so
that it does not occupy the device for long. Source: class `TTSStreamingGenerator` of
`MiniCPMO45/utils.py` in OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm.sampling import Uniforms
from duplane.worker.models.minicpm_o.transfer import upload
from duplane.worker.models.minicpm_o.tts.sampling import (
    REPETITION_WINDOW,
    TOKENS_PER_UNIT,
    SpeechRequest,
)
from duplane.worker.models.minicpm_o.tts.talker import Talker

MAX_PASSAGE_TOKENS = 500


@dataclass
class Passage:
    """The condition rows of a passage and the tokens drawn for it."""

    condition: Tensor
    tokens: list[int] = field(default_factory=list[int])


@dataclass
class SpeechStream:
    """The speech of one slot: its current passage, and state of earlier passages.

    - `history`: the latest tokens of the answer, across passages.
    - `unfed`: a token that the talker's cache does not hold yet.
    - `passage`: the current or latest passage. `earlier`: the passage before it.
    """

    slot: int
    uniforms: Uniforms
    is_greedy: bool
    temperature: float
    condition: Tensor | None = None
    step_count: int = 0
    remaining: int = 0
    fewest: int = 0
    unfed: int | None = None
    history: list[int] = field(default_factory=list[int])
    passage: Passage | None = None
    earlier: Passage | None = None

    def reset(self) -> None:
        """Start an answer without passages."""
        self.history = []
        self.unfed = None
        self.passage = None
        self.earlier = None

    @property
    def is_done(self) -> bool:
        """Whether the passage has ended."""
        return self.remaining == 0

    def begin(self, condition: Tensor, *, fewest: int = 0, most: int = MAX_PASSAGE_TOKENS) -> None:
        """Start a passage with its condition rows [rows, width].

        The passage may end after `fewest` tokens and is cut off after `most`. Raises ValueError if
        the previous passage has not ended.
        """
        if not self.is_done:
            raise ValueError(f"slot {self.slot} has not finished its passage")
        self.condition = condition
        self.step_count = 0
        self.remaining = most
        self.fewest = fewest
        self.earlier, self.passage = self.passage, Passage(condition)

    def accept(self, drawn: list[int], end: int) -> list[int]:
        """Record the tokens drawn for the passage. Return them without the end-of-speech token."""
        has_ended = drawn[-1] == end
        tokens = drawn[:-1] if has_ended else drawn
        if self.passage is not None:
            self.passage.tokens += tokens
        self.step_count += len(tokens)
        self.remaining = 0 if has_ended else self.remaining - len(tokens)
        self.unfed = None if has_ended else tokens[-1]
        self.condition = None
        self.history = [*self.history, *tokens][-REPETITION_WINDOW:]
        return tokens


@torch.inference_mode()
def advance(
    talker: Talker, streams: Sequence[SpeechStream], limit: int = TOKENS_PER_UNIT
) -> list[list[int]]:
    """Draw up to `limit` tokens of each slot's passage, for all slots together.

    The slots must be ascending. An answer that does not fit into the talker's cache continues
    without its earlier rows. As in the reference, the first token of an answer is drawn from all
    candidates, without filters.
    """
    requests: list[SpeechRequest] = []
    for stream in streams:
        rows = _unfed_rows(talker, stream)
        talker.make_room(stream.slot, len(rows) + limit)
        request = SpeechRequest(
            stream.slot,
            rows,
            stream.uniforms,
            stream.is_greedy,
            stream.temperature,
            fewest=stream.fewest - stream.step_count,
            most=min(limit, stream.remaining),
            history=stream.history,
            filtered_from=0 if stream.history else 1,
        )
        requests.append(request)
    drawn = talker.draw(requests)
    return [
        stream.accept(tokens, talker.end) for stream, tokens in zip(streams, drawn, strict=True)
    ]


def _unfed_rows(talker: Talker, stream: SpeechStream) -> Tensor:
    """Return the rows to feed: the last token, and the condition of a new passage.

    If the talker `is_recomputing`, a new passage drops the cache, and the rows of the previous
    passage are fed again.
    """
    table = talker.emb_code[0]
    device = talker.emb_text.weight.device
    if talker.dims.is_recomputing and stream.condition is not None:
        talker.cache.rewind(stream.slot, 0)
        if stream.earlier is None:
            return stream.condition
        tokens = upload(stream.earlier.tokens, device, torch.long)
        return torch.cat((stream.earlier.condition, table(tokens), stream.condition))
    rows = [] if stream.unfed is None else [table(upload([stream.unfed], device))]
    if stream.condition is not None:
        rows.append(stream.condition)
    return torch.cat(rows)
