"""The tokenizer of the checkpoint. It finds the ids of special tokens by their names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import Regex as Pattern
from tokenizers.models import BPE

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, read_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
CHARACTERS_PER_ROW = 64
"""A prompt with more characters per row of context than this is refused before it is encoded."""

# Cuts text into words before byte-pair encoding, as Qwen2 tokenizers do. It is needed only for a
# checkpoint that has vocab.json and merges.txt but no tokenizer.json.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokens:
    """Converts text to ids and back, and has the ids that control a duplex conversation."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos: str,
        bad_ids: Iterable[int] = (),
        unknown: str = "<unk>",
    ) -> None:
        self._tokenizer = tokenizer
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
        self.special = frozenset(
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self.bad_ids = tuple(bad_ids)
        self.forbidden = (self.tts_pad, *self.bad_ids, self.chunk_eos)
        self.terminators = frozenset((self.listen, self.chunk_eos, self.chunk_tts_eos))

    @classmethod
    def load(cls, directory: Path) -> Tokens:
        """Read tokenizer.json, or vocab.json and merges.txt, with tokenizer_config.json.

        Raises `CheckpointError` when files are missing or broken or a special token is unknown.
        """
        config = read_json(directory / CONFIG_FILE)
        tokenizer = _tokenizer(directory, config)
        cast("Any", tokenizer).add_special_tokens(_special_tokens(config))
        bad_ids = cast("list[object]", config.get("bad_token_ids") or [])
        if not all(type(entry) is int and entry >= 0 for entry in bad_ids):
            raise CheckpointError(f"{CONFIG_FILE}: bad_token_ids are not all ids")
        eos = _content(config.get("eos_token")) or "<|im_end|>"
        unknown = _content(config.get("unk_token")) or "<unk>"
        return cls(tokenizer, eos, cast("list[int]", bad_ids), unknown)

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

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)


def _tokenizer(directory: Path, config: dict[str, Any]) -> Tokenizer:
    path = directory / TOKENIZER_FILE
    if path.exists():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for a bad file
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    vocabulary, merges = directory / "vocab.json", directory / "merges.txt"
    if not (vocabulary.exists() and merges.exists()):
        raise CheckpointError(f"{directory} has neither tokenizer.json nor vocab.json, merges.txt")
    # The library's type stubs lack the setters and do not type lists.
    tokenizer: Any = Tokenizer(cast("Any", BPE).from_file(str(vocabulary), str(merges)))
    words = pre_tokenizers.Split(Pattern(_WORDS), "isolated")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    added = cast("dict[str, dict[str, Any]]", config.get("added_tokens_decoder") or {})
    tokenizer.add_tokens([AddedToken(**added[number]) for number in sorted(added, key=int)])
    return tokenizer


def _special_tokens(config: dict[str, Any]) -> list[str]:
    """Return the tokens that the configuration marks as special; `decode` can skip them."""
    named = [_content(config.get(f"{role}_token")) for role in ("bos", "eos", "pad", "unk")]
    more = cast("list[Any]", config.get("additional_special_tokens") or [])
    return [name for name in (*named, *(_content(entry) for entry in more)) if name]


def _content(token: object) -> str | None:
    """Return the text of a token, which is stored as text or as an object that holds the text."""
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    return token if isinstance(token, str) else None
