"""The tokenizer of the checkpoint, with its special tokens by name and its chat template.

transformers builds the tokenizer and renders the template. Text is converted by the object of
`tokenizers` inside, which several threads may use at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import Qwen2Tokenizer

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, read_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
CHARACTERS_PER_ROW = 64
"""A prompt with more characters per row of context than this is refused before it is encoded."""


class Tokens:
    """Converts text to ids and back, and has the ids that control a duplex conversation.

    `marks` are the ids that stand for no text, `forbidden` those that the model never speaks.
    Without `has_chat_template`, there is none to `render` with.
    """

    def __init__(self, loaded: Any, eos: str, bad_ids: Iterable[int], unknown: str) -> None:
        """Use a tokenizer of transformers."""
        self._loaded = loaded
        self._tokenizer: Tokenizer = loaded.backend_tokenizer
        self.has_chat_template = bool(loaded.chat_template)
        self.eos = self.id_of(eos)
        self.unit = self.id_of("<unit>")
        self.unit_end = self.id_of("</unit>")
        self.listen = self.id_of("<|listen|>")
        self.speak = self.id_of("<|speak|>")
        self.tts_bos = self.id_of("<|tts_bos|>")
        self.tts_pad = self.id_of("<|tts_pad|>")
        self.chunk_eos = self.id_of("<|chunk_eos|>")
        self.chunk_tts_eos = self.id_of("<|chunk_tts_eos|>")
        self.turn_eos = self.id_of("<|turn_eos|>")
        self.unknown = self.id_of(unknown)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)
        self.marks = frozenset(added)
        self.bad_ids = tuple(bad_ids)
        self.forbidden = (self.tts_pad, *self.bad_ids, self.chunk_eos)
        self.unspeakable = frozenset(self.forbidden) | self.marks
        self.terminators = frozenset((self.listen, self.chunk_eos, self.chunk_tts_eos))

    @classmethod
    def load(cls, directory: Path) -> Tokens:
        """Read tokenizer.json, or vocab.json and merges.txt, with tokenizer_config.json.

        The chat template is in the configuration or in chat_template.jinja. Raises
        `CheckpointError` when files are missing or broken or a special token is unknown.
        """
        config = read_json(directory / CONFIG_FILE)
        loaded = _load(directory)
        bad_ids = cast("list[object]", config.get("bad_token_ids") or [])
        if not all(type(entry) is int and entry >= 0 for entry in bad_ids):
            raise CheckpointError(f"{CONFIG_FILE}: bad_token_ids are not all ids")
        eos = _content(config.get("eos_token")) or "<|im_end|>"
        unknown = _content(config.get("unk_token")) or "<unk>"
        return cls(loaded, eos, cast("list[int]", bad_ids), unknown)

    def id_of(self, name: str) -> int:
        """Return the id of a special token, e.g. `<|listen|>`; raises `CheckpointError`."""
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise CheckpointError(f"the tokenizer has no token {name!r}")
        return found

    def id_or_unknown(self, entry: str) -> int:
        """Return the id of an entry of the vocabulary, or the id of the unknown token."""
        found = self._tokenizer.token_to_id(entry)
        return self.unknown if found is None else found

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Names of special tokens in it become those tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes of incomplete characters become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def render(self, messages: Iterable[tuple[str, str]], *, is_thinking: bool) -> str:
        """Return the prompt of `(role, text)` messages, without the mark that begins an answer.

        Raises ValueError if the template refuses the messages.
        """
        turns = [{"role": role, "content": text} for role, text in messages]
        try:
            return self._loaded.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=False, enable_thinking=is_thinking
            )
        except TemplateError as error:
            raise ValueError(str(error)) from error

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)


def _load(directory: Path) -> Any:
    names = (TOKENIZER_FILE, "vocab.json", "merges.txt")
    has_whole, *has_parts = ((directory / name).exists() for name in names)
    if not (has_whole or all(has_parts)):
        raise CheckpointError(f"{directory} has neither tokenizer.json nor vocab.json, merges.txt")
    path = directory / names[0 if has_whole else 1]
    try:
        return cast("Any", Qwen2Tokenizer).from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the libraries raise exceptions of any type for a bad file
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _content(token: object) -> str | None:
    """Return the text of a token, which is stored as text or as an object that holds the text."""
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    return token if isinstance(token, str) else None
