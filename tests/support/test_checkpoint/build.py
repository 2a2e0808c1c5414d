"""Builds the tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

from support.test_checkpoint.language_circuit import steer_language
from support.test_checkpoint.talker_circuit import steer_talker
from support.test_checkpoint.voice_files import write_vocoder
from support.test_checkpoint.weights import random_tensors, write_shards

from duplane.tools.checkpoint.configs import model_config, write_configs
from duplane.tools.checkpoint.tensor_shapes import tensor_shapes
from duplane.tools.checkpoint.tokenizer_files import train_tokenizer, write_tokenizer


def build_test_checkpoint(directory: Path, seed: int = 0) -> None:
    """Write a tiny checkpoint in the public format; the same seed gives the same bytes.

    Its random weights are steered: on any audio the model listens, speaks in words and ends its
    turns. Raises OSError if the directory cannot be written.
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
