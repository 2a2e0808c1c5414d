"""Puts the tiny checkpoint together."""

from __future__ import annotations

from pathlib import Path

from duplane.tools.tiny.configs import model_config, write_configs
from duplane.tools.tiny.layout import tensor_shapes
from duplane.tools.tiny.steer_language import steer_language
from duplane.tools.tiny.steer_talker import steer_talker
from duplane.tools.tiny.tokenizer_files import train_tokenizer, write_tokenizer
from duplane.tools.tiny.voice_files import write_vocoder
from duplane.tools.tiny.weights import random_tensors, write_shards


def build_tiny(directory: Path, seed: int = 0) -> None:
    """Write a tiny checkpoint in the public format; the same seed gives the same bytes.

    Its random weights are steered: on any audio it listens, speaks in words and ends its turns.
    Raises OSError where the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    write_tokenizer(tokenizer, directory)
    config = model_config(tokenizer)
    write_configs(config, directory)
    tensors = random_tensors(tensor_shapes(config), seed)
    steer_language(tensors, config, tokenizer, seed)
    steer_talker(tensors, config, tokenizer, seed)
    write_shards(tensors, directory)
    write_vocoder(directory, seed)
