"""The tokens of a turn on their way from the talker to the vocoder, cut into its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Tokens that one chunk turns into sound; the lookahead behind them is heard in the next.
WINDOW_TOKENS = 25
# Silence that every turn starts with, so that its first chunk is a whole window and its lookahead.
PREFIX_TOKENS = 3
# A chunk that is not the last must turn at least this many tokens into sound.
FEWEST_TOKENS = 5


@dataclass(frozen=True)
class TokenChunk:
    """What the vocoder gets at once; the last chunk of a turn has no lookahead in it."""

    tokens: tuple[int, ...]
    is_last: bool


class SpeechTokens:
    """The token buffer of one conversation: pure, and empty but for silence between turns."""

    def __init__(
        self,
        *,
        silence_token_id: int,
        lookahead: int = 3,
        window: int = WINDOW_TOKENS,
        fewest: int = FEWEST_TOKENS,
    ) -> None:
        """Cut chunks of `fewest` to `window` tokens and the `lookahead` tokens behind them."""
        self._prefix = (silence_token_id,) * PREFIX_TOKENS
        self._lookahead = lookahead
        self._window = window
        self._fewest = fewest
        self._pending = list(self._prefix)

    @property
    def pending(self) -> tuple[int, ...]:
        """The tokens that no chunk has turned into sound yet."""
        return tuple(self._pending)

    def push(self, tokens: Sequence[int], *, end_of_turn: bool) -> list[TokenChunk]:
        """Add the tokens of one unit and return the chunks they complete, in order.

        Every chunk takes as much as there is, so that a unit is heard at once; a turn's end
        flushes the rest as the last chunk and starts afresh.
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
        """Forget everything: the next turn starts."""
        self._pending = list(self._prefix)
