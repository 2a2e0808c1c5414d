"""The tokenizer of the default model. Each word of the domain is one token."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from duplane.tools.checkpoint.text import PROSE
from duplane.tools.checkpoint.tokenizer_files import token_id, train_tokenizer
from training.domain import answer_words, question_words

MERGES = 900
WEIGHT = 40
"""Repetitions of the domain's words in the training text, enough to make each word one token."""


def build_tokenizer() -> Tokenizer:
    """Train the tokenizer; the result is always the same."""
    words = sorted({*answer_words(), *question_words()})
    lines = [f"{word} {word} {word.capitalize()} {word.capitalize()}" for word in words]
    return train_tokenizer([*PROSE.splitlines(), *lines * WEIGHT], MERGES)


class Vocabulary:
    """The ids of words and special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.unit, self.unit_end = self.id_of("<unit>"), self.id_of("</unit>")
        self.listen, self.speak = self.id_of("<|listen|>"), self.id_of("<|speak|>")
        self.turn_eos, self.chunk_eos = self.id_of("<|turn_eos|>"), self.id_of("<|chunk_eos|>")
        self.tts_eos = self.id_of("<|tts_eos|>")

    def id_of(self, name: str) -> int:
        """Return the id of a special token."""
        return token_id(self.tokenizer, name)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, which may contain the names of special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def words(self, words: Sequence[str], *, is_start: bool) -> list[int]:
        """Return one id for each word of an answer.

        With `is_start`, the first word has no space.
        """
        ids: list[int] = []
        for index, word in enumerate(words):
            ids += self.encode(word if is_start and index == 0 else f" {word}")
        return ids

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)
