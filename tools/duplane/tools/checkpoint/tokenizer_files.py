"""Trains a small tokenizer: byte-level BPE on the text of `text.py`, with the added tokens of the
released model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import orjson
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import processors as post_processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from duplane.tools.checkpoint.text import PROSE, SPOKEN

MERGES = 1200
SPOKEN_WEIGHT = 8
"""Repetitions of the spoken sentences in the text, enough to make each word one token."""
BAD_TOKENS = 10

# How Qwen2 tokenizers cut text into words before byte-pair encoding.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_ROLES = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": "<unk>",
}


def _pairs(*names: str) -> list[str]:
    return [mark for name in names for mark in (f"<{name}>", f"</{name}>")]


def _pipes(*names: str) -> list[str]:
    return [f"<|{name}|>" for name in names]


# These are not special tokens: `decode` keeps them.
_PLAIN = [
    *_pairs("tool_call"),
    *_pipes("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep"),
    *_pairs("tool_response", "think"),
]

# These tokens are special, but tokenizer_config.json does not list them, as in the released model.
_BASE = [
    *_pipes("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end"),
    *_pipes("box_start", "box_end", "quad_start", "quad_end", "vision_start", "vision_end"),
    *_pipes("vision_pad", "image_pad", "video_pad"),
]
_TURNS = _pipes("turn_bos", "turn_eos")

# The added tokens, in the order of the released model. Their ids are consecutive.
ADDED_TOKENS = [
    "<unk>",
    *_BASE,
    *_PLAIN,
    *_pairs("image", "ref", "box", "quad", "point", "slice", "image_id", "unit", "answer"),
    *_pairs("focus", "line", "perception", "source_image", "image_save_to"),
    *_pipes("audio_start", "audio", "audio_end", "spk_bos", "spk", "spk_eos"),
    *_pipes("tts_bos", "tts_eos", "listen", "speak", "interrupt", "vad_start", "vad_end"),
    *_pipes("emotion_start", "emotion_end", "speed_start", "speed_end"),
    *_pipes("pitch_start", "pitch_end"),
    *_TURNS,
    *_pipes("chunk_eos", "chunk_bos", "chunk_tts_bos", "chunk_tts_eos", "tts_pad"),
    *_pipes(*(f"timbre_{number}" for number in range(7, 32))),
]

# Renders system, user and assistant turns; tool calls are not covered.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
    {%- if use_tts_template -%}{{- '<|tts_bos|>' -}}{%- endif -%}
{%- endif -%}
"""


def own_lines() -> list[str]:
    """Return the training text as lines, with the spoken sentences repeated."""
    return [*PROSE.splitlines(), *(f" {line}" for line in SPOKEN * SPOKEN_WEIGHT)]


def train_tokenizer(lines: Sequence[str] | None = None, merges: int = MERGES) -> Tokenizer:
    """Train on `lines`, by default on `own_lines()`; the same text gives the same ids."""
    # The type is `Any`, because the library's stubs lack the setters and leave lists untyped.
    tokenizer: Any = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = post_processors.ByteLevel(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=256 + merges,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(own_lines() if lines is None else lines, trainer)
    tokenizer.add_tokens(
        [AddedToken(name, special=name not in _PLAIN, normalized=False) for name in ADDED_TOKENS]
    )
    return cast("Tokenizer", tokenizer)


def write_tokenizer(
    tokenizer: Tokenizer, directory: Path, bad_ids: Sequence[int] | None = None
) -> None:
    """Write tokenizer.json, vocab.json, merges.txt and tokenizer_config.json.

    The model never chooses `bad_ids`; by default they are some ids that no spoken sentence has.
    """
    whole = tokenizer.to_str(pretty=False)
    (directory / "tokenizer.json").write_text(whole, encoding="utf-8")
    parsed = orjson.loads(whole)
    vocabulary = sorted(parsed["model"]["vocab"].items(), key=lambda entry: entry[1])
    (directory / "vocab.json").write_bytes(orjson.dumps(dict(vocabulary)))
    merges = [" ".join(pair) for pair in parsed["model"]["merges"]]
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    added = {str(entry.pop("id")): entry for entry in sorted(parsed["added_tokens"], key=_added_id)}
    config = {
        "tokenizer_class": "MiniCPMOTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "errors": "replace",
        "model_max_length": 131072,
        **_ROLES,
        "additional_special_tokens": [name for name in ADDED_TOKENS if _is_additional(name)],
        "added_tokens_decoder": added,
        "bad_token_ids": _bad_tokens(tokenizer) if bad_ids is None else list(bad_ids),
        "chat_template": _CHAT_TEMPLATE,
    }
    path = directory / "tokenizer_config.json"
    path.write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))


def token_id(tokenizer: Tokenizer, name: str) -> int:
    """Return the id of an added token. Raises KeyError if there is none."""
    found = tokenizer.token_to_id(name)
    if found is None:
        raise KeyError(name)
    return found


def spoken_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of each spoken sentence, encoded as if other text came before it."""
    return [tokenizer.encode(f" {line}", add_special_tokens=False).ids for line in SPOKEN]


def _is_additional(name: str) -> bool:
    return name not in (*_BASE, *_PLAIN, *_TURNS)


def _added_id(entry: dict[str, Any]) -> int:
    return entry["id"]


def _bad_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return some ordinary ids that occur in no spoken sentence: those of the last merges."""
    spoken = {token for sentence in spoken_ids(tokenizer) for token in sentence}
    last = tokenizer.get_vocab_size(with_added_tokens=False)
    return sorted([token for token in range(256, last) if token not in spoken][-BAD_TOKENS:])
