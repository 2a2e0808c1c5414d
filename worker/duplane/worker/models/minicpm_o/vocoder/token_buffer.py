"""The buffer between the talker and the vocoder: cuts the tokens of a turn into chunks.

Source: `MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_TOKENS = 25
"""Maximum number of tokens that one chunk decodes, not counting lookahead."""
PREFIX_TOKENS = 3
"""Tokens of silence before a turn. They and the 25 tokens of a unit fill window and lookahead."""
FEWEST_TOKENS = 5
"""Minimum number of tokens that a chunk decodes, unless it is the last of its turn."""


@dataclass(frozen=True)
class TokenChunk:
    """The tokens of one vocoder chunk. The last chunk of a turn has no lookahead."""

    tokens: tuple[int, ...]
    is_last: bool


class SpeechTokens:
    """The token buffer of one conversation. Each turn begins with some tokens of silence."""

    def __init__(
        self,
        *,
        silence_token_id: int,
        lookahead: int = 3,
        window: int = WINDOW_TOKENS,
        fewest: int = FEWEST_TOKENS,
    ) -> None:
        """Cut chunks of `fewest` to `window` tokens, each followed by `lookahead` tokens."""
        self._prefix = (silence_token_id,) * PREFIX_TOKENS
        self._lookahead = lookahead
        self._window = window
        self._fewest = fewest
        self._pending = list(self._prefix)

    @property
    def pending(self) -> tuple[int, ...]:
        """The tokens that were not in a chunk yet, except as lookahead."""
        return tuple(self._pending)

    def push(self, tokens: Sequence[int], *, end_of_turn: bool) -> list[TokenChunk]:
        """Add the tokens of one unit and return the chunks that are complete, in order.

        A chunk has as many tokens as possible, so that a unit needs few chunks. At the end of a
        turn the remaining tokens are its last chunk, and the buffer is reset.
        """
        self._pending += tokens
        chunks: list[TokenChunk] = []
        while len(self._pending) >= self._lookahead + self._fewest:
            taken = self._pending[: self._window + self._lookahead]
            chunks.append(TokenChunk(tuple(taken), is_last=False))
            del self._pending[: len(taken) - self._lookahead]
        if end_of_turn:
            if self._pending:
                chunks.append(TokenChunk(tuple(self._pending), is_last=True))
            self.reset()
        return chunks

    def reset(self) -> None:
        """Drop all tokens and start the next turn."""
        self._pending = list(self._prefix)
