"""Speech of chat answers, passage by passage: each chunk of text becomes one passage.

A passage lasts until the talker ends it. A call of `advance` draws a bounded number of tokens, so
that it does not occupy the device for long. Source: class `TTSStreamingGenerator` of
`MiniCPMO45/utils.py` in OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm.sampling import Uniforms
from duplane.worker.models.minicpm_o.tts.sampling import (
    REPETITION_WINDOW,
    TOKENS_PER_UNIT,
    SpeechRequest,
)
from duplane.worker.models.minicpm_o.tts.talker import Talker

MAX_PASSAGE_TOKENS = 500


@dataclass
class Passage:
    """The condition rows of a passage, the tokens drawn for it, and how many may still be drawn.

    It may end after `fewest` tokens.
    """

    condition: Tensor
    fewest: int
    remaining: int
    tokens: list[int] = field(default_factory=list[int])


@dataclass
class SpeechStream:
    """The speech of one answer in one slot.

    - `passages`: the current or latest passage, and before it the previous one.
    - `history`: the latest tokens of the answer, across passages.
    - `unfed`: a token that the talker's cache does not hold yet.
    """

    slot: int
    uniforms: Uniforms
    is_greedy: bool
    temperature: float
    passages: deque[Passage] = field(default_factory=lambda: deque[Passage](maxlen=2))
    history: Sequence[int] = ()
    unfed: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether the passage has ended."""
        return not self.passages or self.passages[-1].remaining == 0

    def begin(self, condition: Tensor, *, fewest: int = 0, most: int = MAX_PASSAGE_TOKENS) -> None:
        """Start a passage with its condition rows [rows, width].

        The passage may end after `fewest` tokens and is cut off after `most`. Raises ValueError if
        the previous passage has not ended.
        """
        if not self.is_done:
            raise ValueError(f"slot {self.slot} has not finished its passage")
        self.passages.append(Passage(condition, fewest, most))

    def accept(self, drawn: list[int], end: int) -> list[int]:
        """Record the tokens drawn for the passage. Return them without the end-of-speech token."""
        passage, has_ended = self.passages[-1], drawn[-1] == end
        tokens = drawn[:-1] if has_ended else drawn
        passage.tokens += tokens
        passage.remaining = 0 if has_ended else passage.remaining - len(tokens)
        self.unfed = None if has_ended else tokens[-1]
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
        rows, passage = _unfed_rows(talker, stream), stream.passages[-1]
        talker.make_room(stream.slot, len(rows) + limit)
        request = SpeechRequest(
            stream.slot,
            rows,
            stream.uniforms,
            stream.is_greedy,
            stream.temperature,
            fewest=passage.fewest - len(passage.tokens),
            most=min(limit, passage.remaining),
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
    *earlier, passage = stream.passages
    rows = [] if stream.unfed is None else [talker.embed([stream.unfed])]
    if passage.tokens:
        return rows[0]
    if talker.dims.is_recomputing:
        talker.cache.truncate(stream.slot, 0)
        rows = [fed for past in earlier for fed in (past.condition, talker.embed(past.tokens))]
    return torch.cat([*rows, passage.condition])
